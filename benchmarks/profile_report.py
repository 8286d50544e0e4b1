"""Measure the memory of `holdfast profile report`, by the size of the recording.

Two recordings are written by the recorder's own code: the phases of 8 ranks, and the counters of a
node with 8 GPUs. A child process makes the report of each, and of a small recording of the same
kind. The growth from one to the other gives the memory at the most that a report reads. There is no
peer.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common.jobs import DoesNotWork, say
from common.table import Must, Row, parse_arguments, report
from holdfast.profile import METRICS, RecordingWriter, SeriesId
from holdfast.profile.parts import MAX_BYTES

MIB = 1 << 20
FULL_BYTES, QUICK_BYTES, SMALL_BYTES = 508 * MIB, 8 * MIB, MIB
RANKS = GPUS = 8
PHASES = (
    ("data", 0, 2_100_417),
    ("forward", 2_103_298, 31_774_301),
    ("backward", 31_779_154, 91_216_720),
    ("communication", 88_402_117, 91_216_720),
    ("optimizer", 91_220_305, 97_903_412),
)
"""Start and end of each phase in nanoseconds after the start of a step of 0.1 s."""
STEP_NS = 100_000_000
MAX_MIB = 1024
ROWS_AT_ONCE = 500


def write_phases(folder: Path, size_bytes: int) -> None:
    """Record the phases of all ranks, and the memory of each rank once a second."""
    for rank in range(RANKS):
        with RecordingWriter(folder, node="n", rank=rank) as writer:
            step, start_ns = 0, time.monotonic_ns()
            while _size_bytes(folder, f"spans-rank{rank}.jsonl*") < size_bytes / RANKS:
                for _ in range(ROWS_AT_ONCE):
                    begin_ns = start_ns + step * STEP_NS
                    step += 1
                    writer.spans(
                        step, [(name, begin_ns + a, begin_ns + b) for name, a, b in PHASES]
                    )
                    if step % 10 == 0:
                        sizes = {f"{name}_bytes": 41_000_000_000 for name in ("allocated", "peak")}
                        writer.memory(begin_ns, step, reserved_bytes=52_000_000_000, **sizes)


def write_counters(folder: Path, size_bytes: int) -> None:
    """Record the counters of one node, with an idle valley in each minute."""
    series = [
        SeriesId(metric, "synthetic", device=gpu)
        for metric in METRICS
        if metric.startswith("gpu_")
        for gpu in range(GPUS)
    ]
    series += [SeriesId(metric, "host") for metric in ("cpu_utilization", "host_memory_used")]
    series += [SeriesId("process_cpu", "host", rank=rank) for rank in range(RANKS)]
    with RecordingWriter(folder, node="n") as writer:
        second, start_ns = 0, time.monotonic_ns()
        while _size_bytes(folder, "samples-*") < size_bytes:
            for _ in range(ROWS_AT_ONCE):
                second += 1
                value = 0.0 if second % 60 < 5 else 71.13 + second % 17
                writer.sample(start_ns + second * 10**9, dict.fromkeys(series, value))


def _size_bytes(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern))


def peak_mib(folder: Path) -> float:
    """Return the peak memory of a process that makes the report of a recording, in MiB."""
    command = (sys.executable, "-m", "holdfast.cli.main", "profile", "report", str(folder))
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            (*command, "-o", str(folder.with_suffix(".html"))), stdout=output, stderr=output
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise DoesNotWork(f"the report failed: {output.read().decode()}")
    return usage.ru_maxrss / 1024


def measured(write: Callable[[Path, int], None], size_bytes: int) -> tuple[float, float]:
    """Return the size of a recording and the peak memory of its report, in MiB."""
    with tempfile.TemporaryDirectory(prefix="holdfast-profile-") as temporary:
        folder = Path(temporary) / "recording"
        write(folder, size_bytes)
        return _size_bytes(folder, "*") / MIB, peak_mib(folder)


def rows_of(
    name: str, write: Callable[[Path, int], None], size_bytes: int, *, is_quick: bool
) -> list[Row]:
    """Return the rows of one kind of recording.

    A quick run judges the growth, which may be what leads to the most memory. From its few MiB an
    extrapolation to the largest report would multiply the noise of a peak by 70.
    """
    small_mib, small_peak_mib = measured(write, SMALL_BYTES)
    large_mib, large_peak_mib = measured(write, size_bytes)
    growth = (large_peak_mib - small_peak_mib) / (large_mib - small_mib)
    most_mib = MAX_BYTES / MIB
    return [
        Row(
            measure=f"{name}: peak memory of a report on {small_mib:.0f} MiB",
            ours=small_peak_mib,
            unit="MiB",
        ),
        Row(
            measure=f"{name}: peak memory of a report on {large_mib:.0f} MiB",
            ours=large_peak_mib,
            unit="MiB",
        ),
        Row(
            measure=f"{name}: memory ÷ size of the files, growth",
            ours=growth,
            unit="ratio",
            must=Must("<=", MAX_MIB / most_mib) if is_quick else None,
        ),
        Row(
            measure=f"{name}: peak memory on {most_mib:.0f} MiB, by the growth",
            ours=large_peak_mib + growth * (most_mib - large_mib),
            unit="MiB",
            must=None if is_quick else Must("<=", MAX_MIB),
        ),
    ]


def main() -> int:
    args = parse_arguments(__doc__ or "")
    size_bytes = QUICK_BYTES if args.quick else FULL_BYTES
    try:
        rows = []
        for name, write in (
            (f"phases of {RANKS} ranks", write_phases),
            (f"counters of {GPUS} GPUs", write_counters),
        ):
            rows += rows_of(name, write, size_bytes, is_quick=args.quick)
    except DoesNotWork as error:
        say(f"profile_report.py: {error}")
        return 1
    report("The memory of a profile's report", rows, json_file=args.json)
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
