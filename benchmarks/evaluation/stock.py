"""Run lm-eval alone on the suite of 60: two task processes at a time, or one for all tasks."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.jobs import WORKERS, DoesNotWork
from evaluation.suite60 import Suite60, TaskOf60

Scores = dict[str, dict[str, Any]]
"""The row of results of each task, as lm-eval writes it."""
AT_A_TIME = 2
TASK_TIMEOUT_S, SUITE_TIMEOUT_S = 300.0, 900.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def environment(suite: Suite60) -> dict[str, str]:
    """Return the environment of every process on the suite: offline, one data cache, one thread.

    With more threads, torch's sums differ in their last bits, and models this small are slower.
    """
    return {
        **OFFLINE,
        "HF_DATASETS_CACHE": str(suite.folder / "datasets"),
        "XDG_CACHE_HOME": str(suite.folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


@dataclass(frozen=True, kw_only=True)
class Stock:
    """One run of lm-eval, or several."""

    wall_s: float
    cpu_s: float
    scores: Scores
    each_s: dict[str, float]
    """The wall time of each task's own process."""


def one_process(suite: Suite60, model: Path, folder: Path, *, defaults: bool = True) -> Stock:
    """Run all tasks in one process; without `defaults`, lm-eval's own task files are not read."""
    out = folder / "all.json"
    names = [
        ",".join(task.name for task in suite.tasks if task.chat_template is chat)
        for chat in (False, True)
    ]
    script = str(WORKERS / "stock_lm_eval.py")
    command = [sys.executable, script, str(model), str(suite.task_folder), str(out), *names]
    command += ["defaults" if defaults else "none"]
    before_s, began_s = _cpu_s(), time.monotonic()
    _run(command, folder / "all.log", environment(suite), SUITE_TIMEOUT_S)
    wall_s = time.monotonic() - began_s
    scores: Scores = json.loads(out.read_text())["results"]
    return Stock(wall_s=wall_s, cpu_s=_cpu_s() - before_s, scores=scores, each_s={})


def process_a_task(suite: Suite60, tasks: Sequence[TaskOf60], model: Path, folder: Path) -> Stock:
    """Run each task with lm-eval's own command line, `AT_A_TIME` of them at a time."""
    before_s, began_s = _cpu_s(), time.monotonic()
    with ThreadPoolExecutor(AT_A_TIME) as slots:
        runs = list(slots.map(lambda task: _one_task(suite, task, model, folder), tasks))
    wall_s = time.monotonic() - began_s
    scores = {task: row for found, _ in runs for task, row in found.items()}
    each_s = {task.name: seconds for task, (_, seconds) in zip(tasks, runs, strict=True)}
    return Stock(wall_s=wall_s, cpu_s=_cpu_s() - before_s, scores=scores, each_s=each_s)


def _one_task(suite: Suite60, task: TaskOf60, model: Path, folder: Path) -> tuple[Scores, float]:
    out = folder / task.name
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "--model",
        "hf",
        "--model_args",
        f"pretrained={model}",
    ]
    command += ["--tasks", task.name, "--include_path", str(suite.task_folder), "--batch_size", "1"]
    command += ["--device", "cpu", "--output_path", str(out)]
    command += ["--apply_chat_template"] if task.chat_template else []
    began_s = time.monotonic()
    _run(command, folder / f"{task.name}.log", environment(suite), TASK_TIMEOUT_S)
    seconds = time.monotonic() - began_s
    [written] = out.rglob("results_*.json")
    found: Scores = json.loads(written.read_text())["results"]
    return found, seconds


def _run(command: Sequence[str], log: Path, more: dict[str, str], timeout_s: float) -> None:
    """Run a command and all its children to the end.

    Raises:
        DoesNotWork: the command failed or took too long.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **more},
            start_new_session=True,
        )
    try:
        code = process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        how = f"left with {code}" if code is not None else f"took longer than {timeout_s:.0f} s"
        raise DoesNotWork(
            f"{' '.join(command[:6])} ... {how}:\n{log.read_text(errors='replace')[-2000:]}"
        )


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def differences(ours: Scores, theirs: Scores) -> list[str]:
    """Return the numbers that differ in any bit, as `task metric: ours, theirs`."""
    found = []
    for task, row in theirs.items():
        mine = ours.get(task, {})
        for name, value in row.items():
            other = mine.get(name)
            both_nan = value != value and other != other  # noqa: PLR0124
            if not both_nan and other != value:
                found.append(f"{task} {name}: {other}, {value}")
    return found
