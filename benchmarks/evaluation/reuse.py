"""Evaluate the suite of 60 twice in one home: the second time, all answers are known.

The first run starts engines, reads the weights and answers every request. The second run builds the
requests, finds the answers and computes the scores. The model has 26 million weights, so that a
request costs what it costs with a small real model.
"""

import shutil
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from common.jobs import say
from common.machine import Quiet
from common.table import Must, Row
from evaluation.real import ENGINES, cold
from evaluation.stock import differences
from evaluation.suite60 import Suite60, make_suite
from holdfast.evaluate.weights.stamp import SETTLED_AFTER_S

WIDTH, LAYERS = 512, 8
MAX_ROUNDS = 3
SHARE = 0.25


def rows(folder: Path, quiet: Quiet, *, quick: bool, rounds: int, seed: int) -> Iterator[Row]:
    """The rows of a repeated evaluation."""
    suite = make_suite(folder / "suite60", seed=seed, tasks=4 if quick else 60)
    model = suite.model() if quick else _larger(suite)
    run = partial(cold, suite, model, engines=1 if quick else ENGINES)
    # The digest of a file that is newer is not remembered.
    time.sleep(SETTLED_AFTER_S)
    first_s: list[float] = []
    again_s: list[float] = []
    engines = read_bytes = wrong = 0
    for number in range(1 if quick else min(rounds, MAX_ROUNDS)):
        quiet.wait()
        place = folder / f"round-{number}"
        place.mkdir(parents=True)
        seconds, _, first = run(place, name="first")
        first_s.append(seconds)
        seconds, _, again = run(place, name="again")
        again_s.append(seconds)
        say(f"round {number + 1}: {first_s[-1]:.1f} s, and {seconds:.1f} s again")
        logs = place / ".holdfast" / "evaluations" / "again" / "logs"
        engines += len(list(logs.glob("node-*.log")))
        read_bytes += again["remote_bytes"]
        wrong += len(differences(again["results"]["results"], first["results"]["results"]))
        shutil.rmtree(place)
    before_s, after_s = statistics.median(first_s), statistics.median(again_s)
    count = len(suite.tasks)
    yield Row(measure=f"{count} tasks, all answers known (peer: the first time)", ours=after_s,
              peer=before_s, unit="s")  # fmt: skip
    yield Row(measure="time over the first time's", ours=after_s / before_s, unit="ratio",
              must=None if quick else Must("<=", SHARE))  # fmt: skip
    yield Row(measure="engines started", ours=engines, limit=0, unit="engines",
              must=Must("=", 0))  # fmt: skip
    yield Row(measure="bytes of weights read", ours=read_bytes, limit=0, unit="bytes",
              must=Must("=", 0))  # fmt: skip
    yield Row(measure="numbers that differ from the first time's in any bit", ours=wrong,
              limit=0, unit="numbers", must=Must("=", 0))  # fmt: skip


def _larger(suite: Suite60) -> Path:
    """Make a wider and deeper model with the tokenizer of the suite's."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder, small = suite.folder / "models" / "larger", suite.model()
    config = LlamaConfig.from_pretrained(small)
    config.hidden_size, config.num_hidden_layers = WIDTH, LAYERS
    config.intermediate_size, config.head_dim = 2 * WIDTH, WIDTH // config.num_attention_heads
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(small).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder
