"""Trace: characterize 3 million jobs, a gigabyte of telemetry of 2,400 GPUs, and two twins.

The peers are AcmeTrace's own method in pandas (for jobs), and bare DuckDB and bare Polars (for
telemetry). All are interleaved, each measurement in a separate process. The limit is one read of
the file without any work on it.
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from common.jobs import HOLDFAST, WORKERS, DoesNotWork, say
from common.machine import OthersLoad, Quiet
from common.measured import Measured, measure
from common.table import Must, Row, parse_arguments, report

OURS = (sys.executable, str(WORKERS / "trace_ours.py"))
NOTEBOOK = (sys.executable, str(WORKERS / "notebook_jobs.py"))
WIDE = (sys.executable, str(WORKERS / "wide_cdf.py"))
GB = 1e9
TELEMETRY_GB = 80
"""The size of all telemetry of AcmeTrace."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The amount of work."""

    jobs: int
    gpus: int
    samples: int
    copies: int
    """Copies of the wide file in a row, each a year later, for the growth of memory and time."""
    rounds: int
    full: bool
    """True if the absolute musts apply, which are for the full size."""


FULL = Size(jobs=3_000_000, gpus=2400, samples=100_000, copies=4, rounds=3, full=True)
QUICK = Size(jobs=30_000, gpus=120, samples=2_000, copies=2, rounds=1, full=False)


# Inputs


def write_wide(path: Path, *, gpus: int, samples: int, seed: int) -> None:
    """Write GPU_UTIL of so many GPUs every 15 s: idle or busy for minutes, one percent missing.

    The format is that of the released files, which pandas wrote: a column with gaps holds `97.0`.
    """
    generator = np.random.default_rng(seed)
    texts = np.array([f"{value}.0" for value in range(101)] + [""], dtype="S5")
    busy = generator.random(gpus) < 0.65
    times = np.datetime64("2023-07-01T00:00:00") + 15 * np.arange(samples).astype("timedelta64[s]")
    with path.open("wb") as file:
        file.write(
            (
                "Time," + ",".join(f"10.1.{node}.{gpu}" for node, gpu in _places(gpus)) + "\n"
            ).encode()
        )
        for at in times:
            busy ^= generator.random(gpus) < 0.01
            values = np.where(
                busy, generator.integers(85, 101, gpus), generator.integers(0, 100, gpus) // 97
            )
            values[generator.random(gpus) < 0.01] = 101
            stamp = str(at).replace("T", " ").encode() + b"+08:00,"
            file.write(stamp + b",".join(texts[values].tolist()) + b"\n")


def _places(gpus: int) -> Iterator[tuple[int, int]]:
    return ((number // 8, number % 8) for number in range(gpus))


def write_years(source: Path, target: Path, years: int) -> None:
    """Write the file's lines repeatedly below one header, each time a year later.

    Times thus ascend throughout. Every line begins with its year, and `source` spans less than a
    year.
    """
    with source.open("rb") as read, target.open("wb") as write:
        write.write(read.readline())
        body = read.tell()
        for year in range(years):
            read.seek(body)
            for line in read:
                write.write(b"%04d" % (int(line[:4]) + year) + line[4:])
    os.sync()  # or the disk is still busy with it while it is read


def reading_alone(path: Path, folder: Path) -> float:
    """Return the seconds to read a file without any work on it: the physical limit."""
    return measure(("dd", f"if={path}", "of=/dev/null", "bs=16M", "status=none"), folder).wall_s


# Jobs


def job_rows(size: Size, folder: Path, quiet: Quiet, seed: int) -> Iterator[Row]:
    """Yield the rows of a trace of jobs: the whole report, its parts, each question."""
    say(f"writing {size.jobs:,} jobs")
    trace = folder / "trace_seren.csv"
    # In a process of its own: a child's memory begins with its parent's, and ours stays small.
    measure((*OURS, "draw", str(trace), str(size.jobs), str(seed)), folder)
    store = folder / "store"
    measure((*HOLDFAST, "trace", "convert", str(trace), "-o", str(store)), folder)
    reports: list[Measured] = []
    ours: list[dict[str, float]] = []
    peers: list[dict[str, float]] = []
    asked: list[dict[str, float]] = []
    for number in range(size.rounds):
        say(f"jobs, round {number + 1} of {size.rounds}")
        quiet.wait()
        reports.append(
            measure(
                (*HOLDFAST, "trace", "report", str(trace), "-o", str(folder / "report")), folder
            )
        )
        quiet.wait()
        peers.append(_answer(measure((*NOTEBOOK, str(trace)), folder)))
        quiet.wait()
        ours.append(_answer(measure((*OURS, "analyse", str(trace)), folder)))
        quiet.wait()
        asked.append(_answer(measure((*OURS, "questions", str(store)), folder)))
    file_gb = trace.stat().st_size / GB
    yield Row(
        measure=f"{size.jobs / 1e6:g}M jobs ({file_gb * 1000:.0f} MB): the whole report",
        ours=statistics.median(one.wall_s for one in reports),
        limit=reading_alone(trace, folder),
        unit="s",
        must=Must("<=", 15) if size.full else None,
    )
    yield Row(
        measure="its memory",
        ours=max(one.rss_mib for one in reports) * 1.048576,
        unit="MB",
        must=Must("<=", 1000) if size.full else None,
    )
    notebook_s = statistics.median(sum(seconds.values()) for seconds in peers)
    ours_s = statistics.median(one["all"] for one in ours)
    yield Row(measure=f"read and answer: {ours[0]['analyses']:.0f} analyses, the notebook {len(peers[0]) - 1}",
              ours=ours_s, peer=notebook_s, unit="s")  # fmt: skip
    yield Row(measure="times faster than the notebook's method", ours=notebook_s / ours_s, unit="x",
              must=Must(">=", 4) if size.full else None)  # fmt: skip
    slowest = 0.0
    for name in asked[0]:
        one, peer = (
            statistics.median(seconds[name] for seconds in some) for some in (asked, peers)
        )
        slowest = max(slowest, one / peer)
        yield Row(measure=f"question alone: {name}", ours=one, peer=peer, unit="s")
    yield Row(measure="the slowest question, ours over the notebook's", ours=slowest, unit="x",
              must=Must("<=", 1) if size.full else None)  # fmt: skip


# Telemetry


def telemetry_rows(size: Size, folder: Path, quiet: Quiet, seed: int) -> Iterator[Row]:
    """Yield the rows of a wide CSV: the exact CDF from the file and a store, conversion, growth."""
    say(f"writing telemetry of {size.gpus:,} GPUs")
    wide = folder / "GPU_UTIL.csv"
    write_wide(wide, gpus=size.gpus, samples=size.samples, seed=seed)
    runs: dict[str, list[Measured]] = defaultdict(list)
    answers: dict[str, dict[str, float]] = {}
    for number in range(size.rounds):
        say(f"telemetry, round {number + 1} of {size.rounds}")
        store, parquet = folder / f"telemetry-{number}", folder / f"long-{number}.parquet"
        for name, command in {
            "duckdb": (*WIDE, "duckdb", str(wide)),
            "ours": (*OURS, "cdf", str(wide)),
            "polars": (*WIDE, "polars", str(wide)),
            "duckdb converts": (*WIDE, "convert", str(wide), str(parquet)),
            "ours converts": (*OURS, "convert", str(wide), str(store)),
            "duckdb stored": (*WIDE, "parquet", str(parquet)),
            "ours stored": (*OURS, "stored-cdf", str(store)),
        }.items():
            quiet.wait()
            runs[name].append(measure(command, folder))
            answers[name] = _answer(runs[name][-1])
    _agree({name: answer for name, answer in answers.items() if "n" in answer})
    wall_s = {name: statistics.median(one.wall_s for one in some) for name, some in runs.items()}
    fastest_s = min(wall_s["duckdb"], wall_s["polars"])
    limit_s = reading_alone(wide, folder)
    file_gb = wide.stat().st_size / GB
    named = f"{file_gb:.2f} GB of {size.gpus:,} GPUs"
    yield Row(measure=f"{named}: exact CDF (peer: DuckDB)", ours=wall_s["ours"], peer=wall_s["duckdb"], limit=limit_s,
              unit="s")  # fmt: skip
    yield Row(
        measure="the same (peer: Polars)",
        ours=wall_s["ours"],
        peer=wall_s["polars"],
        limit=limit_s,
        unit="s",
    )
    yield Row(measure="ours over the faster of them", ours=wall_s["ours"] / fastest_s, unit="x",
              must=Must("<=", 1.3) if size.full else None)  # fmt: skip
    yield Row(
        measure="memory of the CDF (peer: DuckDB)",
        ours=max(one.rss_mib for one in runs["ours"]) * 1.048576,
        peer=max(one.rss_mib for one in runs["duckdb"]) * 1.048576,
        unit="MB",
        must=Must("<=", 500) if size.full else None,
    )
    yield Row(measure="conversion (peer: DuckDB)", ours=wall_s["ours converts"], peer=wall_s["duckdb converts"],
              unit="s")  # fmt: skip
    yield Row(measure="conversion, ours over DuckDB's", ours=wall_s["ours converts"] / wall_s["duckdb converts"],
              unit="x", must=Must("<=", 1.3) if size.full else None)  # fmt: skip
    yield Row(measure="CDF once converted (peer: DuckDB)", ours=wall_s["ours stored"], peer=wall_s["duckdb stored"],
              unit="s")  # fmt: skip
    yield Row(measure="CDF once converted, over the direct one", ours=wall_s["ours stored"] / wall_s["ours"], unit="x",
              must=Must("<=", 1 / 8) if size.full else None)  # fmt: skip
    if size.full:
        yield from _growth(size, folder, quiet, wide, file_gb, wall_s["ours"])


def _growth(
    size: Size, folder: Path, quiet: Quiet, wide: Path, file_gb: float, once_s: float
) -> Iterator[Row]:
    many = folder / "many" / "GPU_UTIL.csv"
    many.parent.mkdir()
    write_years(wide, many, size.copies)
    quiet.wait()
    one = measure((*OURS, "cdf", str(many)), folder)
    many.unlink()
    yield Row(measure=f"{size.copies} x the file, in ascending times: memory", ours=one.rss_mib * 1.048576, unit="MB",
              must=Must("<=", 500))  # fmt: skip
    yield Row(
        measure=f"{size.copies} x the file, in ascending times: time over the time of one",
        ours=one.wall_s / once_s,
        unit="x",
    )
    per_gb_s = one.wall_s / (size.copies * file_gb)
    yield Row(
        measure=f"{TELEMETRY_GB} GB, extrapolated", ours=TELEMETRY_GB * per_gb_s / 60, unit="min"
    )


# Twins


def twin_rows(folder: Path, quiet: Quiet) -> Iterator[Row]:
    """Yield the rows of both published clusters at full size."""
    say("drawing both twins")
    quiet.wait()
    one = measure((*OURS, "twins", str(folder)), folder)
    answer = _answer(one)
    yield Row(measure=f"twins of Seren and Kalos ({answer['jobs']:,.0f} jobs)", ours=answer["s"], unit="s",
              must=Must("<=", 60))  # fmt: skip


def _answer(run: Measured) -> dict[str, float]:
    found: dict[str, float] = json.loads(run.output.splitlines()[-1])
    return found


def _agree(answers: dict[str, dict[str, float]]) -> None:
    """Check that all engines counted the same samples.

    Raises:
        DoesNotWork: two differ.
    """
    for (name, one), (other, two) in itertools.pairwise(answers.items()):
        if any(not np.isclose(one[key], two[key], rtol=1e-9) for key in ("n", "sum", "median")):
            raise DoesNotWork(f"{name} found {one}, {other} {two}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 0 if all musts are met, else 1."""
    options = parse_arguments(__doc__ or "", arguments, rounds=FULL.rounds)
    size = QUICK if options.quick else replace(FULL, rounds=options.rounds)
    quiet = Quiet(patience_s=0 if options.quick else 60)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name, OthersLoad() as load:
        folder = Path(name)
        rows = [
            *job_rows(size, folder, quiet, options.seed),
            *telemetry_rows(size, folder, quiet, options.seed),
            *(twin_rows(folder, quiet) if size.full else ()),
        ]
    notes = [
        load.sentence(),
        quiet.sentence(),
        f"medians of {size.rounds} round{'s' * (size.rounds > 1)}; memory is the most that one process held",
        "the notebook's own method on the wide file needs about 33 GB (141 bytes a sample), so it is not run",
    ]
    report("Characterizing a cluster", rows, notes=notes, json_file=options.json)
    return 0 if all(row.met is not False for row in rows) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DoesNotWork as error:
        sys.exit(str(error))
