"""Divide the reading of a trace among many workers, and merge their aggregates.

The input is divided into parts: a file, a month of a store, or a telemetry metric. Each worker
reads one part as `load` does, and writes the aggregates of the part. For telemetry, the worker
writes a store together with its aggregates.

The merged trace does not contain single jobs and samples. Analyses that need them are left out,
with a sentence that states the reason. Contradictions between jobs of different parts, such as a
repeated job id, are not found.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.core.atomic import write_atomic
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.trace import aggregates
from holdfast.trace.errors import LeftOut
from holdfast.trace.loading import attach_metrics, by_cluster, is_url, load
from holdfast.trace.sources.recognition import Input, passed_over_note, recognised
from holdfast.trace.sources.stored import JOBS_FILE, is_store
from holdfast.trace.store import merge_partials, write_partials
from holdfast.trace.telemetry import attach
from holdfast.trace.telemetry import convert as convert_telemetry
from holdfast.trace.telemetry.inputs import telemetry_in

if TYPE_CHECKING:
    from holdfast.cluster import Workers
    from holdfast.trace.loading import Progress
    from holdfast.trace.trace import Trace

FAILED_LINES: Final = 5
"""Number of lines from the end of a failed part's log that the error message shows."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The input of one worker: job records, or one telemetry file."""

    jobs: str = ""
    """A path or `NAME=PATH` of job records, as for `load`."""
    compared: bool = False
    options: Mapping[str, Any]
    """Further options, as fields of `LoadOptions`."""
    telemetry: str = ""
    """Path of a telemetry file; the part then has no job records."""
    metric: str | None = None

    @property
    def name(self) -> str:
        """Return a name for the part's result.

        Equal parts have equal names, so an interrupted run can continue. The name depends on the
        size and the modification time of the file, and on the SQL of the aggregates.
        """
        source = Path(self.telemetry) if self.telemetry else Input.of(self.jobs).path
        stat = source.stat()
        read = [
            asdict(self),
            stat.st_size,
            stat.st_mtime_ns,
            [aggregates.sql(name) for name in aggregates.names()],
        ]
        text = json.dumps(read, sort_keys=True, default=str)
        stem = (
            "".join(letter for letter in source.stem if letter.isalnum() or letter in "-_")[:40]
            or "part"
        )
        return f"p-{stem}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def load_spread(
    *paths: str,
    compare: Sequence[str] = (),
    metrics: Sequence[str] = (),
    metrics_step_s: float = 15.0,
    metrics_folder: Path | None = None,
    workers: "Workers",
    folder: Path,
    progress: "Progress | None" = None,
    **options: Any,
) -> "Trace":
    """Read job records and telemetry with many workers.

    Args:
        paths: paths as for `load`. Every file is a part. In a store, every month of submission is a
            part.
        compare: traces that serve only for comparison, as for `load`.
        metrics: telemetry, as for `load`. Every file is a part. This process itself reads stores
            and Prometheus servers after the parts, because a store already has aggregates, and one
            client is enough for Prometheus.
        metrics_step_s: see `LoadOptions.metrics_step_s`.
        metrics_folder: see `LoadOptions.metrics_folder`.
        workers: the executor that runs the parts (`holdfast.cluster.workers`).
        folder: folder for results and logs, which all workers share; existing results are reused.
        progress: called after each part with a description, parts done and total parts.
        options: further fields of `LoadOptions`.

    Raises:
        HoldfastError: a part failed; the message has the end of the part's log.
        BadUse: an argument is wrong, as for `load`, or `paths` has the URL of a ledger, which
            cannot be divided into parts.
    """
    from holdfast.cluster import Task

    passed_over: list[Path] = []
    parts = [part for path in paths for part in _job_parts(path, options, passed_over)]
    parts += [
        part for path in compare for part in _job_parts(path, options, passed_over, compared=True)
    ]
    measured = {where: list(_telemetry_parts(where)) for where in map(_place, metrics)}
    everything = [*parts, *(part for some in measured.values() for part in some)]
    folder.mkdir(parents=True, exist_ok=True)
    tasks = []
    for name, part in {part.name: part for part in everything}.items():
        description = folder / f"{name}.json"
        write_atomic(description, json.dumps(asdict(part), default=str).encode())
        command = (
            sys.executable,
            "-m",
            "holdfast.trace.spread",
            str(description),
            str(folder / name),
        )
        tasks.append(Task(name=name, command=command, result=folder / name))
    if progress:
        progress("Reading in parts", 0, len(tasks))
    with closing(workers.run(tasks, folder=folder / "logs")) as finished:
        for number, one in enumerate(finished, start=1):
            if one.exit_code:
                note = (
                    one.log.read_text(errors="replace").splitlines()[-FAILED_LINES:]
                    if one.log.exists()
                    else []
                )
                raise HoldfastError(
                    f"Part {one.task.name} failed: {' '.join(note) or f'exit code {one.exit_code}'} "
                    f"Its log is {one.log}; run the same command again to go on with the parts that are left."
                )
            if progress:
                progress("Reading in parts", number, len(tasks))
    trace = merge_partials([folder / part.name for part in parts])
    if passed_over:
        trace.notes = [*trace.notes, passed_over_note(next(iter(trace.clusters)), passed_over)]
    try:
        for cluster, where in by_cluster(metrics, list(trace.clusters), trace.compared):
            for part in measured.get(where, ()):
                attach(trace, folder / part.name, cluster=cluster)
            if not measured.get(where):
                attach_metrics(
                    trace,
                    cluster,
                    where,
                    step_s=metrics_step_s,
                    folder=metrics_folder,
                    progress=progress,
                )
    except BaseException:
        trace.close()
        raise
    return trace


def _job_parts(
    given: str, options: Mapping[str, Any], passed_over: list[Path], *, compared: bool = False
) -> Iterator[Part]:
    one = Input.of(given)
    if one.url:
        raise BadUse(
            f"{given} is a ledger, which is read in one piece. Leave out --on, or convert it to a store first."
        )
    prefix = f"{one.name}=" if one.name else ""
    if is_store(one.path) and not (options.get("since") or options.get("until")):
        for since, until in _months(one.path):
            month = {**options, "since": since, "until": until}
            yield Part(jobs=f"{prefix}{one.path}", compared=compared, options=month)
    elif (
        is_store(one.path)
        or one.path.is_file()
        or options.get("format")
        or options.get("column_map")
    ):
        yield Part(jobs=f"{prefix}{one.path}", compared=compared, options=options)
    else:
        for file, source in recognised(one, None, passed_over):
            named = {**options, "format": source.name}
            yield Part(jobs=f"{prefix}{file.path}", compared=compared, options=named)


def _months(store: Path) -> list[tuple[str | None, str | None]]:
    """Return the months of submission in a store, as pairs (since, until).

    The first month has no start and the last month no end, so that no job is left out.
    """
    import duckdb

    with duckdb.connect(config={"temp_directory": ""}) as connection:
        firsts = [
            str(month)
            for (month,) in connection.execute(
                "SELECT DISTINCT strftime(date_trunc('month', submit_at), '%Y-%m-%d') "
                "FROM read_parquet(?, hive_partitioning = false) "
                "WHERE submit_at IS NOT NULL ORDER BY 1",
                [str(store / JOBS_FILE)],
            ).fetchall()
        ]
    cuts = [None, *firsts[1:], None]
    return list(pairwise(cuts))


def _place(given: str) -> str:
    """Return the path in `NAME=PATH` or in a path alone, which may itself contain `=`."""
    _, equals, where = given.partition("=")
    return where if equals and not is_url(given) and not Path(given).exists() else given


def _telemetry_parts(where: str) -> Iterator[Part]:
    """Yield the telemetry files that workers read; none for a store, a server or an empty text."""
    if is_url(where) or not where:
        return
    for given in telemetry_in(Path(where)):
        if given.form != "store":
            yield Part(
                telemetry=str(given.path),
                metric=given.metric.name if given.metric else None,
                options={},
            )


def read_part(part: Part, result: Path) -> None:
    """Read a part and write its result folder atomically; this is what a worker does."""
    building = result.with_name(f".{result.name}.tmp")
    shutil.rmtree(building, ignore_errors=True)
    if part.telemetry:
        convert_telemetry(part.telemetry, building, metric=part.metric)
    else:
        jobs, compare = ((), (part.jobs,)) if part.compared else ((part.jobs,), ())
        with load(*jobs, compare=compare, partial=True, **part.options) as trace:
            # The job may be in another part.
            trace.notes = [note for note in trace.notes if note.check != "reason-of-no-job"]
            write_partials(trace, building, _of_jobs(trace))
    building.replace(result)


def _of_jobs(trace: "Trace") -> Iterator[str]:
    """Yield the names of the aggregates that can be computed from the columns of these jobs."""
    for name in aggregates.names():
        try:
            trace.prepare(name)
        except LeftOut:
            continue
        yield name


def main(arguments: Sequence[str]) -> int:
    """Read one part, as `python -m holdfast.trace.spread PART.json RESULT` does in a worker."""
    described, result = map(Path, arguments)
    try:
        read_part(Part(**json.loads(described.read_text())), result)
    except HoldfastError as error:
        print(error)  # noqa: T201 - the log of the part
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
