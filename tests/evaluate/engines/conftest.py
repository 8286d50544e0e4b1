"""Make tiny random models once a session, and stock lm-eval's answers with them."""

from pathlib import Path

import pytest

WORDS = "the quick brown fox jumps over a lazy dog Question: what is it?\nAnswer: 42\n\n"


def make_tokenizer(folder: Path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([WORDS] * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    return fast


def make_llama(folder: Path, *, seed: int = 0, **changes):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(folder)
    torch.manual_seed(seed)
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.3,
    }
    LlamaForCausalLM(LlamaConfig(**(settings | changes))).save_pretrained(folder)
    return folder


def make_gpt2(folder: Path, *, seed: int = 0):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = make_tokenizer(folder)
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=96,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Make folders by name; "llama-2" and "gpt2-2" have other weights of the same shapes.

    The weights of gpt2 are tied.
    """
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": make_llama(root / "llama"),
        "llama-2": make_llama(root / "llama-2", seed=1),
        "gpt2": make_gpt2(root / "gpt2"),
        "gpt2-2": make_gpt2(root / "gpt2-2", seed=1),
    }


@pytest.fixture(scope="session")
def llama_of():
    """Return a function that makes a folder with a tiny Llama: `(folder, seed=, **config)`."""
    return make_llama


@pytest.fixture(scope="session")
def stock(models):
    """Return stock lm-eval's `--model hf` at batch size 1, by model name."""
    import torch

    torch.set_num_threads(1)
    from lm_eval.models.huggingface import HFLM

    made = {}

    def of(name: str) -> HFLM:
        if name not in made:
            made[name] = HFLM(pretrained=str(models[name]), device="cpu", batch_size=1)
        return made[name]

    return of
