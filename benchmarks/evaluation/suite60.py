"""Make sixty lm-eval tasks and tiny models for them, offline, from a seed.

python suite60.py FOLDER [--seed N] [--checkpoints K]

| kind | tasks | content |
|---|---|---|
| choice | 24 | multiple choice of 2 to 5; a third few-shot, a quarter with mutual information |
| generate | 16 | greedy; some few-shot, some with a regex filter, some by majority of three |
| rolling | 10 | perplexity of whole texts (`loglikelihood_rolling`), many windows long |
| score | 10 | log-probability of a given ending, as in LAMBADA; one with a bootstrap |

A quarter of the tasks of choice, generate and score use the chat template. The number of documents
of a task, and the length of each, are log-normal (sigma 1.0 and 0.7), so that few tasks have most
of the work. Draws are by `random.Random(f"{seed} {task}")`: a task does not depend on other tasks.

The folder gets `tasks/` (YAML and data), `models/llama-K` and `models/gpt2-K`, and `suite.toml`.
The models have random weights; models of one kind differ only in their weights, like a run's
checkpoints.
"""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = (("choice", 24), ("generate", 16), ("rolling", 10), ("score", 10))
DOCUMENTS = {"choice": 11, "generate": 6, "rolling": 4, "score": 12}
"""Median documents of a task."""
MAX_DOCUMENTS = 90
MAX_WORDS = {"choice": 120, "generate": 120, "rolling": 800, "score": 120}
MEDIAN_WORDS = {"choice": 18, "generate": 14, "rolling": 150, "score": 20}
WORD_COUNT = 600
LAYERS, WIDTH, CONTEXT = 2, 64, 512
MAX_NEW_TOKENS = (8, 16, 24, 48)
SPECIAL = ("<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class TaskOf60:
    """One of the tasks, as this module made it."""

    name: str
    kind: str
    documents: int
    chat_template: bool


@dataclass(frozen=True, kw_only=True)
class Suite60:
    """The places of the suite's files."""

    folder: Path
    tasks: tuple[TaskOf60, ...]

    @property
    def task_folder(self) -> Path:
        """The folder for `--include_path`."""
        return self.folder / "tasks"

    @property
    def toml(self) -> Path:
        """The suite in Holdfast's form."""
        return self.folder / "suite.toml"

    def model(self, kind: str = "llama", number: int = 0) -> Path:
        """Return the folder of a Hugging Face model."""
        return self.folder / "models" / f"{kind}-{number}"


def make_suite(folder: Path, *, seed: int = 0, tasks: int = 60, checkpoints: int = 1) -> Suite60:
    """Make the tasks, the suite and `checkpoints` models of each kind.

    With `tasks` below 60, some tasks of every kind are made.
    """
    (folder / "tasks").mkdir(parents=True, exist_ok=True)
    vocabulary = _vocabulary(seed)
    made = [
        _make_task(folder / "tasks", kind, number, vocabulary, seed)
        for kind, number in _chosen(tasks)
    ]
    _make_models(folder / "models", vocabulary, seed, checkpoints)
    suite = Suite60(folder=folder, tasks=tuple(made))
    suite.toml.write_text(_toml(suite))
    return suite


def _chosen(tasks: int) -> list[tuple[str, int]]:
    """Return kinds dealt evenly, so that a few tasks are of all kinds."""
    everything = [
        (position / count, kind, position) for kind, count in KINDS for position in range(count)
    ]
    return [(kind, position) for _, kind, position in sorted(everything)[:tasks]]


def _toml(suite: Suite60) -> str:
    lines = ['name = "suite60"', 'include_paths = ["tasks"]']
    for task in suite.tasks:
        lines += ["", "[[tasks]]", f'name = "{task.name}"']
        lines += ["chat_template = true"] if task.chat_template else []
    return "\n".join(lines) + "\n"


# Tasks


def _vocabulary(seed: int) -> list[str]:
    rng = random.Random(f"{seed} words")
    syllables = [
        a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "il")
    ]
    return sorted({"".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(WORD_COUNT)})


def _words(rng: random.Random, vocabulary: list[str], count: int) -> str:
    # A few words make most of a text, as in any language: the tokenizer finds pieces of several
    # lengths.
    return " ".join(
        vocabulary[int(len(vocabulary) * rng.random() ** 2)] for _ in range(max(1, count))
    )


def _make_task(folder: Path, kind: str, number: int, vocabulary: list[str], seed: int) -> TaskOf60:
    name = f"{kind}_{number:02d}"
    rng = random.Random(f"{seed} {name}")
    count = min(MAX_DOCUMENTS, max(3, round(DOCUMENTS[kind] * rng.lognormvariate(0.0, 1.0))))
    words = MEDIAN_WORDS[kind] * rng.lognormvariate(0.0, 0.4)
    choices = rng.randint(2, 5)

    def document() -> dict[str, Any]:
        length = min(MAX_WORDS[kind], max(3, round(words * rng.lognormvariate(0.0, 0.7))))
        return {
            "text": _words(rng, vocabulary, length),
            "choices": [_words(rng, vocabulary, rng.randint(1, 4)) for _ in range(choices)],
            "answer": rng.randrange(choices),
            "target": " " + _words(rng, vocabulary, rng.randint(1, 3)),
        }

    for split, size in (("test", count), ("train", 24)):
        rows = [document() for _ in range(size)]
        (folder / f"{name}_{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    # JSON is YAML.
    (folder / f"{name}.yaml").write_text(
        json.dumps(_config(folder, name, kind, number), indent=1) + "\n"
    )
    chat = kind != "rolling" and number % 4 == 3
    return TaskOf60(name=name, kind=kind, documents=count, chat_template=chat)


def _config(folder: Path, name: str, kind: str, number: int) -> dict[str, Any]:
    mean = {"aggregation": "mean", "higher_is_better": True}
    config: dict[str, Any] = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {
                split: str((folder / f"{name}_{split}.jsonl").absolute())
                for split in ("test", "train")
            }
        },
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "metadata": {"version": 1.0},
    }
    if (
        kind in ("choice", "generate") and number % 3 == 1
    ):  # examples are drawn at random from the training split
        config |= {
            "training_split": "train",
            "fewshot_split": "train",
            "num_fewshot": 1 + number % 4,
        }
    if kind == "choice":
        metrics = [{"metric": "acc", **mean}, {"metric": "acc_norm", **mean}]
        metrics += [{"metric": "acc_mutual_info", **mean}] if number % 4 == 2 else []
        config |= {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
        }
        return config | {"metric_list": metrics}
    if kind == "rolling":
        metrics = [
            {"metric": metric} for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte")
        ]
        config |= {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
        }
        return config | {"metric_list": metrics}
    config["doc_to_target"] = "{{target}}"
    if kind == "score":
        metrics = [{"metric": "acc", **mean}]
        perplexity = {
            "metric": "perplexity",
            "aggregation": "perplexity",
            "higher_is_better": False,
        }
        metrics += [perplexity] if number == 0 else []
        return config | {"output_type": "loglikelihood", "metric_list": metrics}
    config |= {
        "output_type": "generate_until",
        "generation_kwargs": {
            "until": ["\n", "</s>"],
            "max_gen_toks": MAX_NEW_TOKENS[number % len(MAX_NEW_TOKENS)],
            "do_sample": False,
        },
        "metric_list": [{"metric": "exact_match", **mean}],
    }
    if number % 5 == 2:
        config["metric_list"] += [
            {"metric": "bleu", "aggregation": "bleu", "higher_is_better": True}
        ]
    if number % 5 == 3:
        config["filter_list"] = [
            {
                "name": "first-word",
                "filter": [
                    {"function": "regex", "regex_pattern": r"([a-z]+)"},
                    {"function": "take_first"},
                ],
            }
        ]
    if number % 5 == 4:
        config |= {
            "repeats": 3,
            "filter_list": [
                {
                    "name": "vote",
                    "filter": [{"function": "majority_vote"}, {"function": "take_first"}],
                },
                {"name": "first", "filter": [{"function": "take_first"}]},
            ],
        }
    return config


# Models


def _make_models(folder: Path, vocabulary: list[str], seed: int, checkpoints: int) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = _tokenizer(vocabulary, seed)
    special: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        **special,
    )
    gpt2 = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=4,
        n_positions=CONTEXT,
        initializer_range=0.2,
        **special,
    )
    for number in range(checkpoints):
        makers: list[tuple[str, Any, Any]] = [
            ("llama", LlamaForCausalLM, llama),
            ("gpt2", GPT2LMHeadModel, gpt2),
        ]
        for name, kind, config in makers:
            torch.manual_seed(1000 * seed + number)
            kind(config).save_pretrained(folder / f"{name}-{number}")
            tokenizer.save_pretrained(folder / f"{name}-{number}")


def _tokenizer(vocabulary: list[str], seed: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(f"{seed} tokenizer")
    tokenizer.train_from_iterator([_words(rng, vocabulary, 30) for _ in range(400)], trainer)
    fast: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        pad_token=SPECIAL[2],
        model_max_length=CONTEXT,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def main() -> None:
    """Make the suite of the command line, and list it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("--checkpoints", type=int, default=1)
    options = parser.parse_args()
    made = make_suite(
        options.folder, seed=options.seed, tasks=options.tasks, checkpoints=options.checkpoints
    )
    for task in made.tasks:
        print(
            f"{task.name:12} {task.documents:4} documents{'  chat template' * task.chat_template}"
        )


if __name__ == "__main__":
    main()
