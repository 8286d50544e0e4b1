"""Make a tiny model, tasks of every kind, and a reference engine with lm-eval's own answers."""

import json
import random
from pathlib import Path

import yaml

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "house",
    "tree",
    "river",
    "runs",
    "sleeps",
    "eats",
    "green",
    "old",
    "small",
    "under",
    "over",
    "near",
    "and",
    "then",
    "because",
]

UTILS = """
def process_results(doc, results):
    words = results[0].split()
    return {"length": len(words), "overlap": sum(word in doc["text"] for word in words) / 7.0}

def several(references, predictions, **kwargs):
    text = predictions[0][0] if isinstance(predictions[0], list) else predictions[0]
    return {"part@1": len(text) / 3.0, "part@2": float(len(text.split()))}

def raising(doc, results):
    raise ZeroDivisionError(f"cannot score {doc['text'][:5]}")

def as_lists(resps, docs):
    return [[list(resp)] for resp in resps]
"""


def make_model(folder: Path, *, seed: int = 0) -> Path:
    """Make a random two-layer Llama of 64 tokens with a tokenizer and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(1)
    tokenizer.train_from_iterator([sentence(rng, 12) for _ in range(300)], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=64,
    )
    fast.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def sentence(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def make_tasks(folder: Path, *, documents: int = 6) -> Path:
    """Make tasks of every kind in `folder`, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(2)
    for split, count in (("test", documents), ("train", 12)):
        rows = [
            {
                "text": sentence(rng, rng.randint(3, 9)),
                "choices": [sentence(rng, rng.randint(1, 3)) for _ in range(3)],
                "answer": rng.randrange(3),
                "target": " " + sentence(rng, 2),
                "long": sentence(rng, rng.choice([5, 40, 150])),
            }
            for _ in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "utils.py").write_text(UTILS)
    base = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {name: str(folder / f"{name}.jsonl") for name in ("test", "train")}
        },
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    choice = {
        **base,
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
    }
    generate = {
        **base,
        "output_type": "generate_until",
        "doc_to_target": "{{target}}",
        "generation_kwargs": {"until": ["\n", " cat"], "max_gen_toks": 8, "do_sample": False},
    }
    mean = {"aggregation": "mean", "higher_is_better": True}
    acc = [{"metric": "acc", **mean}, {"metric": "acc_norm", **mean}]
    exact = [{"metric": "exact_match", **mean}]
    bleu = [*exact, {"metric": "bleu", "aggregation": "bleu", "higher_is_better": True}]
    votes = [
        {"name": "vote", "filter": [{"function": "majority_vote"}, {"function": "take_first"}]},
        {"name": "first", "filter": [{"function": "take_first"}]},
    ]
    tasks = {
        "t_choice": {**choice, "metric_list": acc, "tag": ["t_choices"]},
        "t_mutual": {
            **choice,
            "metric_list": [*acc, {"metric": "acc_mutual_info", **mean}],
            "tag": ["t_choices"],
        },
        "t_shots": {
            **choice,
            "metric_list": [
                *acc,
                {"metric": "brier_score", "aggregation": "brier_score", "higher_is_better": False},
            ],
            "training_split": "train",
            "fewshot_split": "train",
            "num_fewshot": 2,
        },
        "t_inputs": {
            **choice,
            "doc_to_text": "{{answer}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{target}}",
            "metric_list": acc[:1],
        },
        "t_score": {
            **base,
            "output_type": "loglikelihood",
            "doc_to_target": "{{target}}",
            "metric_list": [
                {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
                {"metric": "acc", **mean},
            ],
        },
        "t_rolling": {
            **base,
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{long}}",
            "metric_list": [
                {"metric": "word_perplexity"},
                {"metric": "byte_perplexity"},
                {"metric": "bits_per_byte"},
            ],
        },
        "t_generate": {**generate, "metric_list": bleu},
        "t_long": {**generate, "doc_to_text": "{{long}}", "metric_list": exact},
        "t_votes": {**generate, "metric_list": exact, "repeats": 3, "filter_list": votes},
        "t_sampled": {
            **generate,
            "generation_kwargs": {
                "until": ["\n"],
                "max_gen_toks": 6,
                "do_sample": True,
                "temperature": 0.8,
            },
            "metric_list": exact,
            "repeats": 2,
            "filter_list": votes,
        },
    }
    for name, config in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **config}))
    # `!function` is no YAML that a dumper writes.
    own = {
        "t_own": "process_results: !function utils.process_results\nmetric_list:\n"
        "  - metric: length\n    aggregation: mean\n    higher_is_better: true\n"
        "  - metric: overlap\n    aggregation: median\n    higher_is_better: true\n",
        "t_several": "metric_list:\n"
        "  - metric: !function utils.several\n    aggregation: median\n    higher_is_better: true\n"
        "filter_list:\n  - name: lists\n    filter:\n"
        "      - function: custom\n        filter_fn: !function utils.as_lists\n      - function: "
        "take_first\n",
        "t_raising": "process_results: !function utils.raising\nmetric_list:\n"
        "  - metric: length\n    aggregation: mean\n    higher_is_better: true\n",
    }
    for name, text in own.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **generate}) + text)
    group = {
        "group": "t_group",
        "task": ["t_choice", "t_shots", "t_generate"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
        "metadata": {"version": 1},
    }
    (folder / "t_group.yaml").write_text(yaml.safe_dump(group))
    return folder


def make_code_task(folder: Path, *, marked: bool) -> None:
    """Make a task that runs the model's code, like HumanEval; `marked` as such or not."""
    name = "t_code" if marked else "t_code_unmarked"
    (folder / "code_utils.py").write_text(
        "import evaluate as hf_evaluate\n\n"
        'compute_ = hf_evaluate.load("code_eval")\n\n'
        "def pass_at_k(references, predictions, k=None):\n"
        "    return compute_.compute(references=references, predictions=predictions, k=k)[0]\n\n"
        "def build(resps, docs):\n"
        '    return [[doc["text"] + resp for resp in resp_list] for resp_list, doc in zip(resps, docs)]\n'
    )
    (folder / f"{name}.yaml").write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: "
        f"{folder / 'test.jsonl'}\n"
        "test_split: test\noutput_type: generate_until\n"
        + ("unsafe_code: true\n" if marked else "")
        + 'doc_to_text: "{{text}}"\ndoc_to_target: "{{target}}"\nrepeats: 2\n'
        'generation_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 5\n'
        "metric_list:\n  - metric: !function code_utils.pass_at_k\n    aggregation: mean\n    "
        "higher_is_better: true\n"
        "    k: [1, 2]\n"
        "filter_list:\n  - name: code\n    filter:\n"
        "      - function: custom\n        filter_fn: !function code_utils.build\n"
    )
