"""The scores of a model on a suite, as a library: both are tiny and made here, so nothing is downloaded.

python examples/evaluate.py [--out FOLDER]
"""

import argparse
import json
import os
import random
from pathlib import Path

from holdfast.evaluate import EvaluateOptions, evaluate
from holdfast.evaluate.types.engine import EngineSpec

WORDS = (
    "the", "a", "cat", "dog", "house", "tree", "river", "runs", "sleeps", "eats", "green", "old",
    "small", "under", "over", "near", "and", "then",
)  # fmt: skip
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


def make_model(folder: Path) -> Path:
    """A random Llama of two layers; in its place stands what you trained."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        model_max_length=128,
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=128, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    fast.save_pretrained(folder)
    return folder


def make_suite(folder: Path) -> Path:
    """Two tasks as lm-evaluation-harness takes them, and the suite that names them."""
    tasks = folder / "tasks"
    tasks.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    rows = [
        {
            "text": " ".join(rng.choices(WORDS, k=8)),
            "choices": rng.sample(WORDS, 3),
            "answer": rng.randrange(3),
        }
        for _ in range(20)
    ]
    (tasks / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str((tasks / "rows.jsonl").absolute())}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    mean = {"aggregation": "mean", "higher_is_better": True}
    choice = {
        "task": "next_word",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", **mean}],
    }
    generate = {
        "task": "continue",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match", **mean}],
    }
    for task in (choice, generate):
        (tasks / f"{task['task']}.yaml").write_text(json.dumps({**base, **task}))  # JSON is YAML
    suite = folder / "suite.toml"
    suite.write_text('include_paths = ["tasks"]\ntasks = ["next_word", "continue"]\n')
    return suite


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("evaluation"))
    options = parser.parse_args()
    os.environ |= dict.fromkeys(OFFLINE, "1")
    model, suite = make_model(options.out / "model"), make_suite(options.out)

    evaluation = evaluate(
        str(suite),
        str(model),
        options=EvaluateOptions(home=options.out / "home", engine=EngineSpec(threads=1)),
    )

    for score in evaluation.scores:
        print(f"{score.task} {score.metric} {score.value:.4f} of {score.samples} samples")
    print(
        f"It took {evaluation.makespan_s:.1f} s; no schedule can take less than {evaluation.bound_s:.1f} s."
    )
    for cause, seconds in evaluation.account.items():
        print(f"{seconds:.1f} engine-seconds: {cause}")
    print(f"All of it, with a picture: {evaluation.folder}/report.html")


if __name__ == "__main__":
    main()
