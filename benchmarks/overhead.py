"""Measure the cost of supervision for an undisturbed job: steps, calls, memory.

The peer is plain torchrun with the same script, interleaved: A/B/A/B. The limits are an empty call,
and the same steps without supervision. `checkpoint.py` measures the cost of a checkpoint.
"""

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from common.jobs import (
    HOLDFAST,
    TORCHRUN,
    WORKERS,
    DoesNotWork,
    adopt_orphans,
    job,
    last_words,
    say,
    wait_until,
)
from common.machine import OthersLoad, Quiet
from common.table import Must, Row, parse_arguments, report
from holdfast.recover.signals.facts import CannotSee
from holdfast.recover.signals.watch import sources_of_this_host

MIB = 1024 * 1024
JOB_TIMEOUT_S = 300.0
STEP_S = 0.1
MAX_NOISE = 1.1
"""If plain torchrun's own runs differ by more, no ratio of step times is reported."""
WARM_UP_STEPS = 10
"""Steps left out of the step times; memory is read after them."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The amount of work."""

    calls: int
    step_rounds: int
    steps: int
    ranks: int


FULL = Size(calls=2000, step_rounds=6, steps=150, ranks=2)
QUICK = Size(calls=300, step_rounds=1, steps=20, ranks=1)


# run.step


def call_rows(size: Size, quiet: Quiet) -> list[Row]:
    """Return the microseconds of one `run.step`, with and without a supervisor."""
    script = str(WORKERS / "step_calls.py")
    times_us: dict[str, Any] = {}
    for name, launcher in (
        ("supervised", (*HOLDFAST, "run", "--name", "r", "--", sys.executable)),
        ("unsupervised", (sys.executable,)),
    ):
        quiet.wait()
        with tempfile.TemporaryDirectory(prefix="holdfast-overhead-") as temporary:
            folder = Path(temporary)
            result = folder / "times.json"
            with job((*launcher, script, str(size.calls), str(result)), folder) as process:
                answer = _answer_of(process, folder, result)
        if answer["supervised"] != (name == "supervised"):
            raise DoesNotWork(f"run.supervised is {answer['supervised']} where the job is {name}")
        times_us[name] = answer
    no_op_us = [time_us for answer in times_us.values() for time_us in answer["no_op_us"]]
    supervised = times_us["supervised"]
    return [
        Row(
            measure="run.step, supervised: CPU time in all threads ÷ a step of 0.1 s",
            ours=max(0.0, supervised["cpu_us"]) / 1e6 / STEP_S,
            limit=0,
            unit="ratio",
            must=Must("<=", 0.005),
        ),
        *_of_calls(times_us, no_op_us),
    ]


def _of_calls(times_us: Mapping[str, Any], no_op_us: Sequence[float]) -> list[Row]:
    return [
        Row(
            measure=f"run.step, {name}, {words}",
            ours=pick(answer["step_us"]),
            limit=pick(no_op_us),
            unit="µs",
        )
        for name, answer in times_us.items()
        for words, pick in (("median", statistics.median), ("99th percentile", _percentile_99))
    ]


def _percentile_99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


def _answer_of(process: subprocess.Popen[bytes], folder: Path, result: Path) -> Any:
    try:
        code = process.wait(JOB_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise DoesNotWork(f"not over within {JOB_TIMEOUT_S:.0f} s:\n{last_words(folder)}") from None
    if code != 0 or not result.exists():
        raise DoesNotWork(f"exit code {code}:\n{last_words(folder)}")
    return json.loads(result.read_text())


# The signals of the node

READS = 20
"""The reads of each source of signals, after the first one."""


def signal_row() -> Row:
    """Return the share of a core that the agent's reads of this host's signals use."""
    share, sources = 0.0, sources_of_this_host(since_s=time.monotonic())
    for source in sources:
        with contextlib.suppress(CannotSee):
            source.read()
        began_s = time.process_time()
        for _ in range(READS):
            with contextlib.suppress(CannotSee):
                source.read()
        share += (time.process_time() - began_s) / READS / source.period_s
    measure = "reads of the node's signals, without GPUs"
    return Row(measure=measure, ours=100 * share, must=Must("<=", 0.2), unit="% of a core")


# Steps and memory


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One short run of the demonstration's training."""

    step_s: list[float]
    memory_mib: dict[str, float]
    """The memory of each kind of process around the ranks, summed over the kind."""


def step_rows(size: Size, seed: int, quiet: Quiet) -> list[Row]:
    """Return step time and memory of `holdfast run` and plain torchrun, in turn."""
    launchers = {
        "ours": (*HOLDFAST, "run", "--name", "r", "--nproc", str(size.ranks), "--", sys.executable),
        "peer": (*TORCHRUN, "--standalone", f"--nproc-per-node={size.ranks}"),
    }
    found: dict[str, list[Trained]] = {name: [] for name in launchers}
    for number in range(size.step_rounds):
        # Who goes first changes, so that a drift of the machine falls on both alike.
        for name in list(launchers) if number % 2 == 0 else list(reversed(launchers)):
            quiet.wait()
            one = _train(launchers[name], size.steps, seed)
            say(
                f"steps, round {number + 1}, {name}: median {statistics.median(one.step_s) * 1000:.1f} ms"
            )
            found[name].append(one)
    medians_s = {
        name: [statistics.median(one.step_s) for one in runs] for name, runs in found.items()
    }
    ours_s, peer_s = (
        statistics.median(step_s for one in found[name] for step_s in one.step_s)
        for name in launchers
    )
    calm_ours_s, calm_peer_s = (
        statistics.quantiles([step_s for one in found[name] for step_s in one.step_s], n=10)[0]
        for name in launchers
    )
    ratios = [
        mine / theirs for mine, theirs in zip(medians_s["ours"], medians_s["peer"], strict=True)
    ]
    noise = max(medians_s["peer"]) / min(medians_s["peer"])
    # Whichever of the two such a ratio would favour: it would tell of the machine.
    # One run of the peer does not tell how much it differs from itself.
    told = size.step_rounds > 1 and noise <= MAX_NOISE

    def ratio(words: str, value: float) -> Row:
        return Row(
            measure=f"training step, ours ÷ plain torchrun, {words}",
            ours=value if told else None,
            peer=1,
            limit=1,
            unit="ratio" if told else "ratio: too noisy",
        )

    rows = [
        Row(
            measure="training step, median",
            ours=ours_s * 1000,
            peer=peer_s * 1000,
            limit=peer_s * 1000,
            unit="ms",
        ),
        ratio("medians", ours_s / peer_s),
        ratio("10th percentiles", calm_ours_s / calm_peer_s),
        ratio("medians of the lowest pair of runs", min(ratios)),
        ratio("medians of the highest pair of runs", max(ratios)),
        Row(
            measure="  noise: plain torchrun's slowest run ÷ its fastest",
            peer=noise if size.step_rounds > 1 else None,
            unit="ratio",
        ),
    ]
    kinds = ["agent", "guard", "holdfast run", "shims", "supervisor", "torchrun"]
    for one in found["ours"]:
        if sorted(one.memory_mib) != kinds:
            raise DoesNotWork(
                f"around the ranks are {sorted(one.memory_mib)} instead of {kinds}: the sum would be wrong"
            )
    memory = {
        name: {
            kind: statistics.median(one.memory_mib.get(kind, 0.0) for one in runs) for kind in kinds
        }
        for name, runs in found.items()
    }
    rows += [
        Row(
            measure=f"memory, {kind}",
            ours=memory["ours"][kind] / size.ranks,
            peer=memory["peer"][kind] / size.ranks,
            unit="MiB a rank",
        )
        for kind in kinds
    ]
    added = {
        name: sum(kinds.values()) - kinds.get("torchrun", 0.0) for name, kinds in memory.items()
    }
    rows.append(
        Row(
            measure="memory, all of these but torchrun",
            ours=added["ours"] / size.ranks,
            peer=added["peer"] / size.ranks,
            limit=0,
            unit="MiB a rank",
        )
    )
    return rows


def _train(launcher: tuple[str, ...], steps: int, seed: int) -> Trained:
    with tempfile.TemporaryDirectory(prefix="holdfast-overhead-") as temporary:
        folder = Path(temporary)
        result = folder / "moments.json"
        script = (
            str(WORKERS / "timed_demo.py"),
            str(result),
            "--checkpoints",
            str(folder / "checkpoints"),
        )
        options = {"--steps": steps, "--save-every": steps, "--eval-every": steps, "--seed": seed}
        arguments = [str(word) for option in options.items() for word in option]
        with job((*launcher, *script, *arguments), folder) as process:
            training = result.with_suffix(".training")
            wait_until(
                lambda: training.exists() or process.poll() is not None, timeout_s=JOB_TIMEOUT_S
            )
            memory_mib = _memory_mib(process.pid) if process.poll() is None else {}
            moments_s = _answer_of(process, folder, result)
        if len(moments_s) != steps:
            raise DoesNotWork(f"{len(moments_s)} steps instead of {steps}:\n{last_words(folder)}")
        later_s = moments_s[WARM_UP_STEPS:]
        return Trained(
            step_s=[after_s - before_s for before_s, after_s in itertools.pairwise(later_s)],
            memory_mib=memory_mib,
        )


def _memory_mib(launched: int) -> dict[str, float]:
    """Return the PSS of the processes around the ranks by kind; n sharers count 1/n each."""
    found: dict[str, float] = {}
    top = psutil.Process(launched)
    for process in (top, *top.children(recursive=True)):
        try:
            words, pss_bytes = " ".join(process.cmdline()), process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
        kind = _kind(words)
        if kind is not None:
            found[kind] = found.get(kind, 0.0) + pss_bytes / MIB
    return found


def _kind(words: str) -> str | None:
    """Return the kind of a process around the ranks; None: a rank.

    The innermost names of a command line come last.
    """
    for mark, kind in (
        ("holdfast.cli.main", "holdfast run"),
        ("holdfast.recover.supervisor_process", "supervisor"),
        ("holdfast.recover.agent.agent", "agent"),
        ("holdfast.recover.launching.guard", "guard"),
        ("torch.distributed.run", "torchrun"),
        ("holdfast.recover.shim.rank_shim", "shims"),
    ):
        if mark in words:
            return kind
    return None


def main() -> int:
    args = parse_arguments(__doc__ or "")
    adopt_orphans()
    size = QUICK if args.quick else FULL
    quiet = Quiet(patience_s=0.0 if args.quick else 20.0)
    try:
        with OthersLoad() as others:
            rows = [*call_rows(size, quiet), signal_row(), *step_rows(size, args.seed, quiet)]
    except DoesNotWork as error:
        say(f"overhead.py: {error}")
        return 1
    per_call = (
        "run.step: single calls with a loss tensor, 2 ms apart, in turn with a call that does nothing (the limit); "
        "the line to the supervisor is written by another thread"
    )
    per_step = (
        f"training step: the demonstration's GPT, gloo ranks: {size.ranks}, {size.steps} steps a run, "
        f"{size.step_rounds} pairs of runs in turn; no ratio is told where plain torchrun's own runs differ by "
        f"more than {MAX_NOISE:g} times, and one closer to 1 than that difference says nothing"
    )
    memory = "memory: PSS, shared pages divided among their users; torchrun itself runs in both"
    report(
        "The cost of supervision",
        rows,
        notes=(per_call, per_step, memory, quiet.sentence(), others.sentence()),
        json_file=args.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
