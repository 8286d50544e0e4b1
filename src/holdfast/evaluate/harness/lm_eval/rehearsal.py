"""Run two tiny tasks once in the parent process, so that forked clients start warm.

lm-eval, transformers and torch import and set up many modules at first use, which takes seconds.
Every client that is forked afterwards inherits these modules.
"""

import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.evaluate.harness.lm_eval.metrics import Exchange, StreamedMetrics
from holdfast.evaluate.harness.lm_eval.model import EngineLM
from holdfast.evaluate.types.harness import AnsweredSample, ModelFacts, SampleRequests
from holdfast.evaluate.types.requests import Answer

_TASKS = ("multiple_choice", "generate_until")


def rehearse() -> None:
    """Run two tiny tasks with a vocabulary of two tokens through lm-eval's evaluator."""
    logging.disable(logging.WARNING)  # hides the messages of these tasks
    try:
        with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
            _run(Path(folder))
    finally:
        logging.disable(logging.NOTSET)


def _run(folder: Path) -> None:
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    _open_a_data_set(folder)
    _make_tokenizer(folder)
    facts = ModelFacts(model=0, name="", tokenizer=str(folder), max_length=1024)
    lm: Any = EngineLM(facts, {}, 0)
    lm.exchange = Exchange(_Nobody(facts), lm, StreamedMetrics(b""))
    manager = TaskManager(include_defaults=False)
    loaded = manager.load([_task(kind) for kind in _TASKS])
    lm.exchange.tasks = loaded["tasks"]
    manager.load = lambda _names: loaded
    evaluator.simple_evaluate(model=lm, tasks=list(_TASKS), task_manager=manager, bootstrap_iters=0)


class _Nobody:
    """An `EngineClient` without engines, which makes up the answers."""

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts

    def ask(self, samples: Sequence[SampleRequests]) -> list[AnsweredSample]:
        answer = Answer(logprob=-1.0)
        return [
            AnsweredSample(sample=one.sample, answers=[answer for _ in one.requests])
            for one in samples
        ]

    async def ask_one(self, sample: SampleRequests) -> AnsweredSample:
        return self.ask([sample])[0]


def _documents(**_: Any) -> Any:
    from datasets import Dataset, DatasetDict

    return DatasetDict(
        test=Dataset.from_list([{"text": "a", "answer": 0}, {"text": "b", "answer": 1}])
    )


def _task(kind: str) -> dict[str, Any]:
    task = {
        "task": kind,
        "custom_dataset": _documents,
        "test_split": "test",
        "output_type": kind,
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
    }
    return task | ({"doc_to_choice": ["a", "b"]} if kind == "multiple_choice" else {})


def _open_a_data_set(folder: Path) -> None:
    """Open a dataset without reading it.

    Arrow reads with threads, and a process that will be forked must have one thread.
    """
    from datasets import load_dataset_builder

    file = folder / "test.jsonl"
    file.write_text('{"text": "a"}\n')
    load_dataset_builder("json", data_files={"test": str(file)}, cache_dir=str(folder / "cache"))


def _make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    kind: Any = PreTrainedTokenizerFast
    kind(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<eos>").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
