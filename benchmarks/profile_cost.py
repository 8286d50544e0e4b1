"""Measure the cost of a profile: CPU time of sampler and hooks, and wall time per step.

The peer is the same loop without a profile, in turn in one process: A/B/A/B. CPU time decides; wall
time on a shared machine is noisy, and is reported with its noise.
"""

import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

from common.jobs import DoesNotWork, say
from common.machine import OthersLoad, Quiet
from common.table import Must, Row, parse_arguments, report
from holdfast.profile import (
    LocalSampler,
    Recording,
    RecordingWriter,
    captured,
    record,
    request_capture,
)
from holdfast.profile.sampler import Sampler
from holdfast.profile.sources.host import Host
from holdfast.profile.sources.nvidia import GPM_METRICS, Nvidia
from holdfast.testing.nvml import FakeGpu, FakeNvml

STEP_S = 0.1
"""The step with which costs are compared. It is short: a longer step lowers every share."""
GPUS = 8
CAPTURE_EVERY_S = 600.0
"""Seconds between captures of 3 steps in deep mode, which takes 10 samples a second."""
DEEP_INTERVAL_S = 0.1
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Size:
    """The amount of work."""

    sampler_s: float
    samples: int
    hook_steps: int
    rounds: int
    wall_steps: int


FULL = Size(sampler_s=30, samples=2000, hook_steps=2000, rounds=6, wall_steps=20)
QUICK = Size(sampler_s=4, samples=100, hook_steps=200, rounds=2, wall_steps=5)


# The sampler


def sampler_share(interval_s: float, seconds: float) -> tuple[float, float]:
    """Return the CPU seconds per second of a real sampler on this host, and those of its start."""
    with tempfile.TemporaryDirectory(prefix="holdfast-profile-") as folder:
        sampler = LocalSampler(Path(folder), "n", interval_s)
        try:
            sampler.look({0: os.getpid()})
            process = psutil.Process(sampler.pid)
            while not list(Path(folder).glob("samples-*")):
                time.sleep(0.05)
            time.sleep(1.0)
            start_s, began_s = _cpu_s(process), time.monotonic()
            time.sleep(seconds)
            used_s, passed_s = _cpu_s(process) - start_s, time.monotonic() - began_s
        finally:
            sampler.close()
        if not Recording.read(Path(folder)).of("process_memory"):
            raise DoesNotWork("the sampler has recorded no rank")
    return used_s / passed_s, start_s


def _cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and its children, in nanoseconds if possible."""
    total_s = 0.0
    for one in (process, *process.children(recursive=True)):
        schedstat = Path(f"/proc/{one.pid}/schedstat")
        if schedstat.exists():
            total_s += int(schedstat.read_text().split()[0]) / 1e9
        else:
            times = one.cpu_times()
            total_s += times.user + times.system
    return total_s


def sample_s(samples: int) -> tuple[float, float, float]:
    """Return the CPU seconds of a sample of 8 emulated GPUs, and of this host with 8 ranks.

    Both include the writing. The third number is the bytes of both.
    """
    gpu = FakeGpu(gpm={number: lambda _: 50.0 for number in GPM_METRICS})
    nvml = FakeNvml([gpu] * GPUS)
    source, host = Nvidia(nvml, with_gpm=True), Host()
    host.pids = dict.fromkeys(range(GPUS), os.getpid())
    # The emulated device integrates its counters; that work is no part of the sampler.
    nvml.nvmlGpmMetricsGet = _constant  # type: ignore[method-assign]
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-profile-") as folder,
        RecordingWriter(Path(folder), node="n") as writer,
    ):
        sampler = Sampler(writer, host, None)

        def of_gpus(number: int) -> None:
            nvml.now_s = float(number)
            writer.sample(number * 10**9, source.read(number * 10**9))

        gpus_s = _each(of_gpus, samples)
        host_s = _each(lambda number: sampler.sample(number * 10**9), samples)
        size_bytes = sum(file.stat().st_size for file in Path(folder).iterdir())
    return gpus_s, host_s, size_bytes / samples


def _constant(wanted: object) -> object:
    for one in wanted.metrics[: wanted.numMetrics]:  # type: ignore[attr-defined]
        one.nvmlReturn, one.value = 0, 50.0
    return wanted


def _each(work: Callable[[int], None], count: int) -> float:
    work(1)
    began_s = time.process_time()
    for number in range(2, count + 2):
        work(number)
    return (time.process_time() - began_s) / count


# The hooks


class Loop:
    """A training loop; only the size of its model matters here."""

    def __init__(self, width: int, layers: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.batch = torch.ones(32, width)

    def steps(self, count: int) -> tuple[float, list[float]]:
        """Return the CPU seconds of so many steps, and the wall seconds of each."""
        walls = []
        began_s = time.process_time()
        for _ in range(count):
            step_s = time.perf_counter()
            self.model(self.batch).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            walls.append(time.perf_counter() - step_s)
        return time.process_time() - began_s, walls


@contextmanager
def phases_only(folder: Path, loop: Loop):  # noqa: ANN201 - a context
    """Record the phases of the loop, without a sampler."""
    os.environ["HOLDFAST_PROFILE"] = str(folder)
    try:
        with record(modules=[loop.model]):
            yield
    finally:
        os.environ.pop("HOLDFAST_PROFILE", None)


def hooks_s(size: Size) -> list[float]:
    """Return the CPU seconds that hooks and their thread add to a step, per pair of blocks.

    The steps are minimal, so that the hooks are a large part of them: a larger model has the same
    hooks.
    """
    loop = Loop(width=4, layers=1)
    loop.steps(size.hook_steps)
    added = []
    with tempfile.TemporaryDirectory(prefix="holdfast-profile-") as folder:
        for number in range(size.rounds):
            plain_s, _ = loop.steps(size.hook_steps)
            with phases_only(Path(folder) / str(number), loop):
                hooked_s, _ = loop.steps(size.hook_steps)
            recorded = Recording.read(Path(folder) / str(number))
            if len(recorded.spans) + recorded.dropped_spans != 3 * size.hook_steps:
                raise DoesNotWork(
                    f"{len(recorded.spans)} spans were recorded of {3 * size.hook_steps}"
                )
            added.append((hooked_s - plain_s) / size.hook_steps)
    return added


def wall_rows(size: Size, quiet: Quiet) -> list[Row]:
    """Return the wall time of a step with and without a whole profile, and the noise."""
    loop = Loop(width=512, layers=8)
    loop.steps(3)
    walls: dict[str, list[float]] = {"plain": [], "profiled": []}
    with tempfile.TemporaryDirectory(prefix="holdfast-profile-") as folder:
        for number in range(size.rounds):
            quiet.wait()
            order = ("plain", "profiled") if number % 2 == 0 else ("profiled", "plain")
            for name in order:
                if name == "plain":
                    walls[name].append(statistics.median(loop.steps(size.wall_steps)[1]))
                    continue
                with record(Path(folder) / str(number), modules=[loop.model]):
                    walls[name].append(statistics.median(loop.steps(size.wall_steps)[1]))
    plain_s, profiled_s = (statistics.median(walls[name]) for name in ("plain", "profiled"))
    noise = max(walls["plain"]) / min(walls["plain"])
    return [
        Row(
            measure="training step, wall time, median",
            ours=profiled_s * 1000,
            peer=plain_s * 1000,
            unit="ms",
        ),
        Row(
            measure="  noise: the slowest block without a profile ÷ the fastest",
            peer=noise,
            unit="ratio",
        ),
    ]


# A capture


@dataclass(frozen=True, kw_only=True)
class Capture:
    """The cost of one capture of 3 steps."""

    cpu_s: float
    bytes_an_event: float
    size_bytes: int
    events: int


def capture_cost() -> Capture:
    """Return the cost of a trace of 3 steps of 8 layers, from request to written file."""
    loop = Loop(width=256, layers=8)
    loop.steps(20)
    with tempfile.TemporaryDirectory(prefix="holdfast-profile-") as temporary:
        folder = Path(temporary)
        with phases_only(folder, loop):
            # Each process's first capture also loads the profiler, which a job does once.
            counts = []
            for _ in range(2):
                request = request_capture(folder, kinds=["trace"], ranks=[0], max_bytes=512 * MIB)
                began_s, steps = time.process_time(), 0
                while not (found := captured(folder, request)):
                    loop.steps(5)
                    steps += 5
                counts.append((time.process_time() - began_s, steps))
            used_s, steps = counts[-1]
            plain_s = min(loop.steps(steps)[0] for _ in range(3))
        if found[0].state != "done":
            raise DoesNotWork(f"the capture was refused: {found[0].reason}")
        content = gzip.decompress((folder / "captures" / found[0].file).read_bytes())
        assert json.loads(content)["traceEvents"]
        return Capture(
            cpu_s=max(0.0, used_s - plain_s),
            bytes_an_event=len(content) / found[0].events,
            size_bytes=found[0].size_bytes,
            events=found[0].events,
        )


def rows_of(size: Size, quiet: Quiet) -> list[Row]:
    """Return all rows."""
    quiet.wait()
    share, start_s = sampler_share(1.0, size.sampler_s)
    deep_share, _ = sampler_share(DEEP_INTERVAL_S, size.sampler_s)
    gpus_s, host_s, sample_bytes = sample_s(size.samples)
    added = hooks_s(size)
    hook_s = max(0.0, statistics.median(added))
    capture = capture_cost()
    # A host with 8 GPUs has the work of reading them beside that of this host.
    default = 100 * (share + gpus_s + hook_s / STEP_S)
    deep = 100 * (
        deep_share + gpus_s / DEEP_INTERVAL_S + hook_s / STEP_S + capture.cpu_s / CAPTURE_EVERY_S
    )
    say(f"hooks: {[round(one * 1e6) for one in added]} µs a step")
    return [
        Row(
            measure=f"default: CPU time of sampler (1 Hz, {GPUS} GPUs) and hooks ÷ a step of {STEP_S:g} s",
            ours=default,
            limit=0,
            unit="%",
            must=Must("<=", 0.3),
        ),
        Row(
            measure=f"deep: 10 Hz, and a capture of 3 steps each {CAPTURE_EVERY_S / 60:.0f} min",
            ours=deep,
            limit=0,
            unit="%",
            must=Must("<=", 2.0),
        ),
        Row(measure="  sampler at 1 Hz on this host", ours=100 * share, unit="% of a core"),
        Row(measure="  sampler at 10 Hz on this host", ours=100 * deep_share, unit="% of a core"),
        Row(measure="  sampler's start, once", ours=start_s, unit="s of CPU"),
        Row(measure=f"  one sample of {GPUS} emulated GPUs", ours=gpus_s * 1e6, unit="µs of CPU"),
        Row(
            measure=f"  one sample of this host with {GPUS} ranks",
            ours=host_s * 1e6,
            unit="µs of CPU",
        ),
        Row(
            measure=f"  a day's samples of {GPUS} GPUs and {GPUS} ranks",
            ours=sample_bytes * 86400 / 1e6,
            unit="MB",
        ),
        Row(measure="  hooks of one step, with their thread", ours=hook_s * 1e6, unit="µs of CPU"),
        Row(measure="  one capture of 3 steps", ours=capture.cpu_s, unit="s of CPU"),
        Row(measure="  the capture's file", ours=capture.size_bytes / MIB, unit="MiB"),
        Row(
            measure="  a trace's bytes an event, uncompressed",
            ours=capture.bytes_an_event,
            unit="B",
        ),
        *wall_rows(size, quiet),
    ]


def main() -> int:
    args = parse_arguments(__doc__ or "")
    torch.set_num_threads(1)
    size = QUICK if args.quick else FULL
    quiet = Quiet(patience_s=0.0 if args.quick else 20.0)
    try:
        with OthersLoad() as others:
            rows = rows_of(size, quiet)
    except DoesNotWork as error:
        say(f"profile_cost.py: {error}")
        return 1
    devices = (
        "no GPU was there: the time of a driver is in no row; emulated GPUs give the time of reading, checking and "
        "writing their values"
    )
    hooks = (
        "hooks: steps of a model with one layer, with and without a profile in turn; the difference of the CPU time in "
        "all threads of the process"
    )
    notes: Sequence[str] = (devices, hooks, quiet.sentence(), others.sentence())
    report("The cost of a profile", rows, notes=notes, json_file=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
