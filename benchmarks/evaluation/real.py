"""Run `holdfast eval` beside stock lm-eval, on the suite of 60 and a tiny Llama.

*Cold* is `holdfast eval run` with an empty home, from the start of the command to its end. *Warm*
is `holdfast eval watch` after one checkpoint: another checkpoint of the same shape is committed,
with other weights, so that no answer in the journal applies. The time is from the commit until its
results are written.
"""

import json
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from common.jobs import HOLDFAST, DoesNotWork, job, last_words, say, wait_until
from common.machine import Quiet
from common.table import Must, Row
from evaluation.stock import (
    AT_A_TIME,
    Scores,
    Stock,
    differences,
    environment,
    one_process,
    process_a_task,
)
from evaluation.suite60 import Suite60, make_suite

SAMPLED = 12
RUN_TIMEOUT_S = 600.0
CHECKPOINTS = 3
WARM_A_ROUND = 2
ENGINES = 2
"""Engines on two cores."""
AS_STOCK = ("--engine", "hf", "--mode", "exact", "--threads", "1", "--no-progress")
"""Stock lm-eval has one thread too: with more threads, the last bits differ."""


@dataclass
class Found:
    """All measurements."""

    sampled: list[Stock] = field(default_factory=list)
    whole: list[Stock] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)
    cold_cpu_s: list[float] = field(default_factory=list)
    warm_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Scores that differ from stock."""
    compared: int = 0
    """Runs that were compared."""
    ratios: list[float] = field(default_factory=list)
    """Makespan over the run's own bound, cold."""


def rows(folder: Path, quiet: Quiet, *, quick: bool, rounds: int, seed: int) -> Iterator[Row]:
    """The rows of the real suite."""
    suite = make_suite(
        folder / "suite60",
        seed=seed,
        tasks=4 if quick else 60,
        checkpoints=1 if quick else CHECKPOINTS,
    )
    if quick:
        yield from _smoke(suite, folder)
        return
    sampling, found = random.Random(f"{seed} sampled"), Found()
    truth: dict[Path, Scores] = {}
    # The truth comes first, for comparison. This run also fills the cache of data sets.
    for kind in ("llama", "gpt2"):
        model = suite.model(kind)
        truth[model] = one_process(suite, model, _new(folder / f"truth-{kind}")).scores
    for number in range(rounds):
        plan = ["sampled", "whole", "cold", "warm"]
        sampling.shuffle(plan)
        for step in plan:
            quiet.wait()
            place = _new(folder / f"{step}-{number}")
            _measure(step, suite, place, sampling, found, truth, number)
            shutil.rmtree(place)
    _also_gpt2(suite, folder, found, truth)
    yield from _rows(found, suite)


def _smoke(suite: Suite60, folder: Path) -> Iterator[Row]:
    """Run a few tasks on a stream of two equal checkpoints, and stock once beside the first."""
    model, count = suite.model(), len(suite.tasks)
    with ThreadPoolExecutor(1) as aside:
        running = aside.submit(one_process, suite, model, _new(folder / "stock"), defaults=False)
        found = warm(
            suite, _new(folder / "warm"), 1, checkpoints=1, engines=1, after_first=running.result
        )
        [(path, seconds, said)] = found
        stock = running.result()
    assert path == model
    wrong = differences(said["results"]["results"], stock.scores)
    _say_wrong(wrong)
    yield Row(measure=f"{count} tasks, warm (peer: one stock process, from its start, beside ours)", ours=seconds,
              peer=stock.wall_s, unit="s")  # fmt: skip
    yield Row(measure="numbers that differ from stock lm-eval's in any bit", ours=len(wrong), limit=0, unit="numbers",
              must=Must("=", 0))  # fmt: skip


def _measure(
    step: str,
    suite: Suite60,
    place: Path,
    sampling: random.Random,
    found: Found,
    truth: dict[Path, Scores],
    number: int,
) -> None:
    model = suite.model()
    if step == "sampled":
        tasks = sampling.sample(suite.tasks, SAMPLED)
        found.sampled.append(process_a_task(suite, tasks, model, place))
        found.wrong += differences(truth[model], found.sampled[-1].scores)
        say(
            f"round {number + 1}: {len(tasks)} processes of one task each: {found.sampled[-1].wall_s:.1f} s"
        )
    elif step == "whole":
        found.whole.append(one_process(suite, model, place))
        found.wrong += differences(found.whole[-1].scores, truth[model])
        say(f"round {number + 1}: one process for all tasks: {found.whole[-1].wall_s:.1f} s")
    elif step == "cold":
        seconds, cpu_s, said = cold(suite, model, place)
        found.cold_s.append(seconds)
        found.cold_cpu_s.append(cpu_s)
        found.ratios += [said["ratio"]] if said.get("ratio") else []
        _compare(found, said, truth[model], "cold")
        say(f"round {number + 1}: holdfast, cold: {seconds:.1f} s")
    else:
        for path, seconds, said in warm(suite, place, WARM_A_ROUND):
            found.warm_s.append(seconds)
            if path not in truth:
                truth[path] = one_process(suite, path, _new(place / f"truth-{path.name}")).scores
            _compare(found, said, truth[path], "warm")
            say(f"round {number + 1}: holdfast, warm: {seconds:.1f} s")


def _compare(found: Found, said: dict[str, Any], truth: Scores, what: str) -> None:
    found.compared += 1
    found.wrong += [f"{what}: {one}" for one in differences(said["results"]["results"], truth)]
    found.wrong += [f"{what}: {task} has no scores: {why}" for task, why in said["errors"].items()]


def _also_gpt2(suite: Suite60, folder: Path, found: Found, truth: dict[Path, Scores]) -> None:
    model = suite.model("gpt2")
    _, _, said = cold(suite, model, _new(folder / "gpt2"))
    _compare(found, said, truth[model], "gpt2")


def _rows(found: Found, suite: Suite60) -> Iterator[Row]:
    count = len(suite.tasks)
    share = [count / len(one.each_s) for one in found.sampled]
    naive_s = statistics.median(
        one.wall_s * times for one, times in zip(found.sampled, share, strict=True)
    )
    naive_cpu_s = statistics.median(
        one.cpu_s * times for one, times in zip(found.sampled, share, strict=True)
    )
    whole_s, whole_cpu_s = (
        statistics.median(getattr(one, name) for one in found.whole) for name in ("wall_s", "cpu_s")
    )
    cold_s, warm_s = statistics.median(found.cold_s), statistics.median(found.warm_s)
    naive = f"a stock process a task, {AT_A_TIME} at a time"
    for name, ours_s, least, whole_most in (("cold", cold_s, 15, 1.2), ("warm", warm_s, 50, 0.5)):
        yield Row(
            measure=f"{count} tasks, {name} (peer: {naive})", ours=ours_s, peer=naive_s, unit="s"
        )
        yield Row(
            measure=f"{count} tasks, {name} (peer: one stock process for all)",
            ours=ours_s,
            peer=whole_s,
            unit="s",
        )
        yield Row(measure=f"{name}: times as fast as {naive}", ours=naive_s / ours_s, unit="x",
                  must=Must(">=", least))  # fmt: skip
        yield Row(measure=f"{name}: time over that of one stock process for all", ours=ours_s / whole_s, peer=1,
                  unit="ratio", must=Must("<=", whole_most))  # fmt: skip
    cold_cpu_s = statistics.median(found.cold_cpu_s)
    yield Row(
        measure=f"CPU time, cold (peer: {naive})", ours=cold_cpu_s, peer=naive_cpu_s, unit="s"
    )
    yield Row(
        measure="CPU time, cold (peer: one stock process for all)",
        ours=cold_cpu_s,
        peer=whole_cpu_s,
        unit="s",
    )
    yield Row(
        measure=f"warm: the slowest of {len(found.warm_s)} checkpoints",
        ours=max(found.warm_s),
        unit="s",
    )
    if found.ratios:
        yield Row(measure="cold: makespan over the run's own bound", ours=statistics.median(found.ratios), limit=1,
                  unit="ratio")  # fmt: skip
    _say_wrong(found.wrong)
    yield Row(measure=f"numbers that differ from stock lm-eval's in any bit, of {found.compared} runs of ours",
              ours=len(found.wrong), limit=0, unit="numbers", must=Must("=", 0))  # fmt: skip


def _say_wrong(wrong: Sequence[str]) -> None:
    for one in wrong[:10]:
        say(f"DIFFERS: {one}")


# Ours


def cold(
    suite: Suite60, model: Path, folder: Path, *, name: str = "cold", engines: int = ENGINES
) -> tuple[float, float, dict[str, Any]]:
    """Return the wall and CPU seconds of `holdfast eval run`, and its output.

    `name` is the id of the evaluation in the home below `folder`.

    Raises:
        DoesNotWork: the command failed or did not end in time.
    """
    command = [
        *HOLDFAST,
        "eval",
        "run",
        "--suite",
        str(suite.toml),
        "--model",
        str(model),
        *AS_STOCK,
    ]
    command += ["--engines-per-node", str(engines), "--id", name]
    before_s, began_s = _cpu_s(), time.monotonic()
    with job(command, folder, environment=environment(suite)) as process:
        try:
            code = process.wait(timeout=RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - began_s
    if code != 0:
        raise DoesNotWork(f"holdfast eval run left with {code}:\n{last_words(folder, 30)}")
    return seconds, _cpu_s() - before_s, _results(folder, name)


def warm(
    suite: Suite60,
    folder: Path,
    count: int,
    *,
    checkpoints: int = CHECKPOINTS,
    engines: int = ENGINES,
    after_first: Callable[[], object] = lambda: None,
) -> Iterator[tuple[Path, float, dict[str, Any]]]:
    """Yield the seconds from the commit of a checkpoint to its results, for `count` checkpoints.

    The first checkpoint is left out; `after_first` is called when it has its results.

    Raises:
        DoesNotWork: results did not come in time.
    """
    stream = _new(folder / "checkpoints")
    command = [*HOLDFAST, "eval", "watch", str(stream), "--suite", str(suite.toml), *AS_STOCK]
    command += ["--engines-per-node", str(engines)]
    found = []
    with job(command, folder, environment=environment(suite)) as process:
        for step in range(count + 1):
            model = suite.model(number=step % checkpoints)
            began_s = _commit(model, stream, step)
            wanted = f"*-step-{step}"
            # The command goes on after it; if it ends, it failed.
            wait_until(partial(_ended, process, folder, wanted), timeout_s=RUN_TIMEOUT_S)
            seconds = time.monotonic() - began_s
            if not _has_results(folder, wanted):
                raise DoesNotWork(
                    f"holdfast eval watch did not evaluate checkpoint {step}:\n{last_words(folder, 30)}"
                )
            if step:
                found.append((model, seconds, _results(folder, wanted)))
            else:
                after_first()
        process.send_signal(signal.SIGINT)
        wait_until(lambda: process.poll() is not None, timeout_s=20.0)
    yield from found


def _commit(model: Path, stream: Path, step: int) -> float:
    """Commit a checkpoint to the folder as transformers' Trainer does; return the time."""
    coming = stream.parent / "coming"
    shutil.copytree(model, coming)
    (coming / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    os.sync()
    coming.rename(stream / f"checkpoint-{step}")
    return time.monotonic()


def _ended(process: "subprocess.Popen[bytes]", folder: Path, evaluation: str) -> bool:
    return _has_results(folder, evaluation) or process.poll() is not None


def _has_results(folder: Path, evaluation: str) -> bool:
    return any((folder / ".holdfast" / "evaluations").glob(f"{evaluation}/results.json"))


def _results(folder: Path, evaluation: str) -> dict[str, Any]:
    [path] = (folder / ".holdfast" / "evaluations").glob(f"{evaluation}/results.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _cpu_s() -> float:
    used: Sequence[float] = resource.getrusage(resource.RUSAGE_CHILDREN)[:2]
    return sum(used)


def stock_in_full(
    folder: Path, quiet: Quiet, *, quick: bool, rounds: int, seed: int
) -> Iterator[Row]:
    """Run every task in a separate stock process, once; this takes many minutes."""
    del rounds
    suite = make_suite(folder / "suite60", seed=seed, tasks=4 if quick else 60)
    one_process(suite, suite.model(), _new(folder / "first"))  # fills the cache of data sets
    quiet.wait()
    full = process_a_task(suite, suite.tasks, suite.model(), _new(folder / "each"))
    name = f"{len(suite.tasks)} stock processes, {AT_A_TIME} at a time"
    yield Row(measure=f"{name}: all of them", peer=full.wall_s, unit="s")
    yield Row(measure=f"{name}: CPU", peer=full.cpu_s, unit="s")
    for task, seconds in full.each_s.items():
        yield Row(measure=f"{name}: {task}", peer=seconds, unit="s")
