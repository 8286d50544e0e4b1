"""Compare an engine with a PEFT adapter with stock lm-eval's `peft=`: the same bits."""

import random
import shutil
import sys

import pytest

from holdfast.core.errors import BadUse
from holdfast.evaluate.engines.hf.engine import TransformersEngine
from holdfast.evaluate.types.engine import EngineSpec, SwapRefused
from holdfast.evaluate.types.requests import Request, Sampling, pack_tokens, unpack_tokens

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing:FutureWarning"
)  # peft 0.21 reads it of transformers 5.23


def make_adapter(base, folder, config, *, resized=0):
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(base)
    if resized:
        model.resize_token_embeddings(resized)
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:  # fresh adapters add zero
            torch.nn.init.normal_(parameter, std=0.3 if "lora" in name else 1.0)
    adapted.save_pretrained(folder, save_embedding_layers=bool(resized))
    return folder


def lora(**changes):
    from peft import LoraConfig

    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "task_type": "CAUSAL_LM"}
    return LoraConfig(
        **{**settings, "target_modules": ["q_proj", "v_proj", "down_proj"], **changes}
    )


def beside(base, adapter, folder):
    """Make the folder that a node makes of a base and its adapter."""
    shutil.copytree(base, folder)
    shutil.copytree(adapter, folder / "adapter")
    return folder


@pytest.fixture(scope="module", params=["lora", "dora", "ia3", "added tokens"])
def case(request, models, llama_of, tmp_path_factory):
    """Return a base, an adapter, and the folder of both."""
    from peft import IA3Config

    root, base, resized = tmp_path_factory.mktemp("adapters"), models["llama"], 0
    if request.param == "added tokens":
        base = llama_of(root / "base", vocab_size=300)
        from transformers import AutoTokenizer

        resized = len(AutoTokenizer.from_pretrained(base))
    config = {
        "lora": lora(),
        "dora": lora(use_dora=True),
        "added tokens": lora(),
        "ia3": IA3Config(
            target_modules=["k_proj", "down_proj"],
            feedforward_modules=["down_proj"],
            task_type="CAUSAL_LM",
        ),
    }[request.param]
    adapter = make_adapter(base, root / "adapter", config, resized=resized)
    return base, adapter, beside(base, adapter, root / "both")


def loaded(folder, mode="exact"):
    engine = TransformersEngine(EngineSpec(device="cpu", threads=1, mode=mode))
    engine.load(folder)
    return engine


def answers(engine, requests):
    engine.submit(list(enumerate(requests)))
    found = {}
    while len(found) < len(requests):
        found |= {one.id: one for one in engine.step()}
    assert not [one.error for one in found.values() if one.error]
    return [found[place].answer for place in range(len(requests))]


def test_scores_and_generations_have_the_bits_of_stock_with_peft(case):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    base, adapter, both = case
    stock = HFLM(pretrained=str(base), peft=str(adapter), device="cpu", batch_size=1)
    plain = HFLM(pretrained=str(base), device="cpu", batch_size=1)
    rng = random.Random(1)
    pairs = [
        ([rng.randrange(2, 290) for _ in range(rng.randrange(1, 60))], [rng.randrange(2, 290)] * 2)
        for _ in range(12)
    ]
    asked = [(None, *pair) for pair in pairs]
    scores = stock._loglikelihood_tokens(asked, disable_tqdm=True)
    assert scores != plain._loglikelihood_tokens(asked, disable_tqdm=True), "the adapter counts"
    prompts = ["the quick brown", "Question: what is it? Answer:"]
    instances = [
        Instance("generate_until", {}, (one, {"until": ["never"], "max_gen_toks": 20}), 0)
        for one in prompts
    ]
    texts = stock.generate_until(instances, disable_tqdm=True)

    engine = loaded(both)
    assert "peft " in engine.numerics()
    got = answers(
        engine,
        [
            *(
                Request(
                    kind="loglikelihood",
                    prompt=pack_tokens(context),
                    continuation=pack_tokens(continuation),
                )
                for context, continuation in pairs
            ),
            *(
                Request(
                    kind="generate",
                    prompt=pack_tokens(stock.tok_encode(prompt)),
                    sampling=Sampling(max_new_tokens=20),
                )
                for prompt in prompts
            ),
        ],
    )
    assert [(one.logprob, one.is_greedy) for one in got[: len(pairs)]] == scores
    assert [stock.tok_decode(unpack_tokens(one.tokens)) for one in got[len(pairs) :]] == texts


def test_adapters_are_not_swapped_in_place(case, models):
    _, _, both = case
    with pytest.raises(SwapRefused, match="PEFT adapter"):
        loaded(both).swap(models["llama"])
    with pytest.raises(SwapRefused, match="PEFT adapter"):
        loaded(models["llama"]).swap(both)


def test_without_peft_one_sentence_has_the_way(case, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        BadUse, match=r"needs peft\. Run on each node: pip install 'holdfast\[peft\]'$"
    ):
        loaded(case[2])


def test_an_adapter_of_another_base_or_of_prompts_is_refused(models, llama_of, tmp_path):
    from peft import PromptTuningConfig

    adapter = make_adapter(models["llama"], tmp_path / "lora", lora())
    wide = llama_of(tmp_path / "wide", hidden_size=64)
    with pytest.raises(BadUse, match=r"does not fit its base: .*--base FOLDER"):
        loaded(beside(wide, adapter, tmp_path / "mixed"))
    prompts = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    adapter = make_adapter(models["llama"], tmp_path / "prompts", prompts)
    with pytest.raises(BadUse, match="of the type PROMPT_TUNING, which adds tokens"):
        loaded(beside(models["llama"], adapter, tmp_path / "both"))


def test_an_adapter_of_a_type_that_peft_does_not_have_is_refused(models, tmp_path):
    adapter = make_adapter(models["llama"], tmp_path / "lora", lora())
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace('"LORA"', '"LORA2030"'))
    with pytest.raises(
        BadUse, match=r"of the type LORA2030, which peft [\d.]+ does not have\. Inst"
    ):
        loaded(beside(models["llama"], adapter, tmp_path / "both"))


@pytest.mark.filterwarnings("default")  # as for users: these tests make errors of warnings
def test_an_adapter_whose_weights_reach_no_layer_or_are_cut_is_refused(models, tmp_path):
    from safetensors.torch import load_file, save_file

    adapter = make_adapter(models["llama"], tmp_path / "lora", lora())
    weights = adapter / "adapter_model.safetensors"
    renamed = {
        name.replace(".layers.", ".language_model.layers."): tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(renamed, weights)
    with pytest.raises(BadUse, match=r"missing adapter keys.* \.\.\. Give the base") as refused:
        loaded(beside(models["llama"], adapter, tmp_path / "renamed"))
    assert len(str(refused.value)) < 500
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(BadUse, match=r"unreadable \(.*\)\. Copy the adapter again"):
        loaded(beside(models["llama"], adapter, tmp_path / "cut"))
