"""Load files into a trace: recognise, read, join by cluster, assign job types, check."""

import math
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from zoneinfo import ZoneInfo

from holdfast.core.errors import BadUse
from holdfast.core.paths import holdfast_home
from holdfast.trace.checks import check_jobs, note_missing_gpus
from holdfast.trace.clusters import sized
from holdfast.trace.jobtypes import DEFAULT_RULES, add_types, read_rules
from holdfast.trace.schema import DURATIONS
from holdfast.trace.sources.csv.mapped import mapped_source
from holdfast.trace.sources.csv.reasons import join_reasons
from holdfast.trace.sources.joining import ASSUMED_SIZE, joined, renamed
from holdfast.trace.sources.reading import Reading, Source, keep_span, set_span, span_ends
from holdfast.trace.sources.recognition import (
    Input,
    named_source,
    passed_over_note,
    recognised,
)
from holdfast.trace.sources.stored import is_store
from holdfast.trace.trace import Trace, open_scratch

if TYPE_CHECKING:
    import duckdb

Progress = Callable[[str, float, float | None], None]
"""A function `progress(description, done, total)`; `total` is None if the amount is unknown."""

BAD_ROWS: Final = ("fail", "drop")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options for reading job records. These are the keywords of `load`, checked on construction.

    Raises:
        BadUse: an option is wrong; the message lists the allowed values.
    """

    compare: Sequence[str | Path] | Mapping[str, str | Path] = ()
    """Additional traces that serve only for comparison.

    The keys of a mapping are the names of their clusters.
    """
    metrics: Sequence[str | Path] = ()
    """Telemetry: files, folders, stores or Prometheus URLs.

    `NAME=WHERE` assigns one of them to the cluster NAME.
    """
    reasons: Sequence[str | Path] = ()
    """CSV files of failure reasons, for records without reasons.

    The columns are `job_id`, `reason` and optionally `attempt`. `NAME=FILE` assigns a file to a
    cluster.
    """
    metrics_step_s: float = 15.0
    """Seconds between the points requested from Prometheus, for the time span of the jobs."""
    metrics_folder: Path | None = None
    """Folder of the store for data from Prometheus.

    Points that are already in the store are not fetched again. None means a folder below
    `$HOLDFAST_HOME/telemetry` that is named after the server.
    """
    format: str | None = None
    """Name of the adapter for all paths.

    None recognises the adapter of each file by its header or first lines.
    """
    column_map: Path | None = None
    """TOML file that maps the columns of CSV or Parquet files; see `sources.csv.mapped`."""
    types: Path | None = None
    """YAML file of rules that assign job types if the source has none; by default Holdfast's."""
    capacity: Mapping[str, str] | Sequence[str] = ()
    """Cluster sizes as `NODESxGPUS`, where GPUS is the number in one node, such as `286x8`.

    Give a mapping by cluster name, or texts `NAME=286x8`. NAME is optional if there is only one
    cluster.
    """
    zone: str | None = None
    """IANA time zone of times that have no zone, for adapters that define no zone of their own."""
    duration: str = "run"
    """Definition of a job's duration, one of `schema.DURATIONS`."""
    since: str | None = None
    """Leave out jobs submitted before this time (ISO 8601, UTC).

    Jobs without a submission time are left out too.
    """
    until: str | None = None
    """Leave out jobs submitted at or after this time (ISO 8601, UTC)."""
    bad_rows: str = "fail"
    """Action on an unreadable row: `fail`, or `drop` the row and count it in a note."""
    memory_limit_mb: int = 700
    """Memory limit of the database in MB; beyond this, the database spills to disk."""
    partial: bool = False
    """True if the paths are only one part of a trace.

    Options that name clusters outside this part are then ignored.
    """
    now_s: float | None = None
    """The current time in seconds since the Unix epoch; None reads the clock."""

    def __post_init__(self) -> None:
        _check("bad_rows", self.bad_rows, BAD_ROWS)
        _check("duration", self.duration, DURATIONS)
        if self.zone is not None:
            _check_zone(self.zone)
        if self.format is not None and self.column_map is not None:
            raise BadUse(
                "A format and a column map were given. Choose one: a map describes a format of its own."
            )
        span_ends(self.since, self.until)


def load(*paths: str | Path, progress: Progress | None = None, **options: Any) -> Trace:
    """Read the job records of one or more clusters.

    Args:
        paths: files, folders of files, stores that `store.convert` wrote, or URLs of ledgers.
            `NAME=PATH` names the cluster NAME. Files of the same cluster are joined.
        progress: called while files are read, with a description, bytes done and total bytes.
        options: the fields of `LoadOptions`.

    Raises:
        BadUse: the arguments are wrong.
        BadTrace: a file cannot be read; the message names the place.
        NotFound: a file does not exist.
    """
    given = LoadOptions(**options)
    rules = read_rules(given.types or DEFAULT_RULES)
    chosen = (
        mapped_source(given.column_map)
        if given.column_map
        else named_source(given.format)
        if given.format
        else None
    )
    compare = given.compare
    named = compare.items() if isinstance(compare, Mapping) else [("", path) for path in compare]
    inputs = [Input.of(path) for path in paths]
    inputs += [replace(Input.of(path, name), compared=True) for name, path in named]
    if not inputs:
        raise BadUse("No job records were given. Name a file, or a folder of them.")
    connection, scratch = open_scratch(memory_limit_mb=given.memory_limit_mb)
    try:
        connection.execute("SET VARIABLE bad_rows = $1", [given.bad_rows])
        connection.execute("SET VARIABLE zone = $1", [given.zone])
        set_span(connection, given.since, given.until)
        readings, compared = _read_all(connection, inputs, chosen, progress)
        known = [cluster.name for reading in readings for cluster in reading.clusters]
        readings = _sized(
            readings, dict(by_cluster(given.capacity, known, compared, partial=given.partial))
        )
        for name, where in by_cluster(given.reasons, known, compared, partial=given.partial):
            readings = [
                join_reasons(connection, reading, Path(where))
                if name in _names(reading)
                else reading
                for reading in readings
            ]
        readings = [add_types(connection, reading, rules) for reading in readings]
        if progress:
            progress("Checking", 0, None)
        now_s = time.time() if given.now_s is None else given.now_s
        readings = [
            replace(
                reading,
                notes=(*reading.notes, *check_jobs(connection, reading, now_s=now_s)),
            )
            for reading in readings
        ]
        trace = Trace(connection, scratch, readings, duration=given.duration, compared=compared)
        if not given.partial:  # A month without GPUs says nothing about the other months.
            trace.notes = note_missing_gpus(connection, readings, trace.notes, compared=compared)
        for name, where in by_cluster(given.metrics, known, compared, partial=given.partial):
            attach_metrics(
                trace,
                name,
                where,
                step_s=given.metrics_step_s,
                folder=given.metrics_folder,
                progress=progress,
            )
    except BaseException:
        connection.close()
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return trace


def _check(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise BadUse(f"{name} is {value!r}. Allowed: {', '.join(allowed)}.")


def _read_all(
    connection: "duckdb.DuckDBPyConnection",
    inputs: Sequence[Input],
    chosen: Source | None,
    progress: Progress | None,
) -> tuple[list[Reading], frozenset[str]]:
    """Read the job records of all inputs.

    Returns:
        One reading per cluster or group of clusters, and the names of the clusters that serve only
        for comparison.
    """
    files: list[tuple[Input, Source]] = []
    passed_over: list[Path] = []
    for given in inputs:
        # `format` and `column_map` apply neither to stores nor to compared traces.
        own_form = given.compared or is_store(given.path)
        files += recognised(given, None if own_form else chosen, passed_over)
    total, done = sum(_size_bytes(one.path) for one, _ in files), 0
    readings: list[Reading] = []
    owner: dict[str, bool] = {}
    unsettled: dict[str, Callable[[duckdb.DuckDBPyConnection, Reading], Reading]] = {}
    for number, (one, source) in enumerate(files):
        if progress:
            progress(f"Reading {one.path.name}", done, total)
        reading = source.read(connection, one.path, f"jobs_{number}")
        keep_span(connection, reading)
        if one.name:
            reading = renamed(connection, reading, one.name)
        for cluster in reading.clusters:
            if owner.setdefault(cluster.name, one.compared) != one.compared:
                raise BadUse(
                    f"{cluster.name} is to be compared with itself. Give one of the two a name: NAME={one.path}."
                )
        before, readings = len(readings), joined(connection, readings, reading)
        if source.settle and len(readings) == before:
            unsettled[reading.clusters[0].name] = source.settle
        done += _size_bytes(one.path)
    for name, settle in unsettled.items():
        readings = [
            settle(connection, reading) if reading.clusters[0].name == name else reading
            for reading in readings
        ]
    if passed_over:
        first, *others = readings
        note = passed_over_note(first.clusters[0].name, passed_over)
        readings = [replace(first, notes=(*first.notes, note)), *others]
    if progress:
        progress("Reading", total, total)
    return readings, frozenset(name for name, compared in owner.items() if compared)


def by_cluster(
    given: Mapping[str, str] | Sequence[str | Path],
    known: Sequence[str],
    compared: frozenset[str],
    *,
    partial: bool = False,
) -> list[tuple[str, str]]:
    """Assign each text `NAME=VALUE` to its cluster.

    NAME is optional if there is only one cluster.

    Args:
        given: values by cluster name, or texts `NAME=VALUE`.
        known: names of all clusters.
        compared: names of the clusters that serve only for comparison.
        partial: True if `known` is only a part of the clusters; values for other clusters are then
            skipped.

    Returns:
        Pairs of cluster name and value.

    Raises:
        BadUse: a text names no cluster although there are several.
    """
    if isinstance(given, Mapping):
        return [(name, what) for name, what in given.items() if name in known or not partial]
    own = [name for name in known if name not in compared]
    named = []
    for text in map(str, given):
        name, _, what = text.partition("=")
        if name not in known:
            if partial and (not own or (what and not Path(text).exists())):
                continue
            if len(own) != 1:
                if what and "/" not in name:
                    raise BadUse(
                        f"{text!r} names the cluster {name}, which the input does not have. Give "
                        f"one of {', '.join(known)}."
                    )
                raise BadUse(
                    f"The cluster of {text!r} is unknown. Give NAME={text}, with NAME one of {', '.join(known)}."
                )
            name, what = own[0], text
        if not what:
            raise BadUse(f"{text!r} has no value for {name}. Give {name}=VALUE, or leave it out.")
        named.append((name, what))
    return named


def _names(reading: Reading) -> list[str]:
    return [cluster.name for cluster in reading.clusters]


def _sized(readings: Sequence[Reading], capacity: Mapping[str, str]) -> list[Reading]:
    known = [cluster.name for reading in readings for cluster in reading.clusters]
    if unknown := sorted(set(capacity) - set(known)):
        raise BadUse(
            f"A capacity was given for {unknown[0]!r}. The clusters are {', '.join(known)}."
        )
    return [
        replace(
            reading,
            clusters=tuple(
                sized(cluster, capacity[cluster.name]) if cluster.name in capacity else cluster
                for cluster in reading.clusters
            ),
            notes=tuple(
                note
                for note in reading.notes
                if note.check != ASSUMED_SIZE or note.cluster not in capacity
            ),
        )
        for reading in readings
    ]


def is_url(where: str) -> bool:
    """Return True if the telemetry is a URL and not a path."""
    return where.startswith(("http://", "https://"))


def attach_metrics(
    trace: Trace,
    cluster: str,
    where: str,
    *,
    step_s: float,
    folder: Path | None,
    progress: Progress | None,
) -> None:
    """Attach telemetry to one cluster of a trace.

    From a Prometheus server, the time span of the cluster's jobs is read.

    Args:
        trace: the trace that receives the telemetry.
        cluster: name of the cluster.
        where: a file, a folder, a store or a URL.
        step_s: see `LoadOptions.metrics_step_s`.
        folder: see `LoadOptions.metrics_folder`.
        progress: see `load`.

    Raises:
        BadUse: there is no telemetry, or the jobs have no times, so the time span to read from a
            server is unknown. Further errors are listed at `telemetry.attach`.
    """
    from holdfast.trace.telemetry import attach
    from holdfast.trace.telemetry.prometheus import Span

    if not is_url(where):
        attach(trace, where, cluster=cluster, progress=progress)
        return
    first_s, last_s = trace.query(
        f"SELECT epoch(min(min_start_at)) AS first_s, epoch(max(max_end_at)) AS last_s "
        f"FROM {trace.prepare('job_counts')} WHERE cluster = ?",
        [cluster],
    ).columns.values()
    if math.isnan(first_s[0]):
        raise BadUse(
            f"The jobs of {cluster} have no times, so the span to fetch from {where} is unknown. Fetch it yourself."
        )
    # Round to whole steps. A second run then requests the same points and finds them in the store.
    span = Span(
        start_s=first_s[0] // step_s * step_s, end_s=-(-last_s[0] // step_s) * step_s, step_s=step_s
    )
    name = re.sub(
        r"[^A-Za-z0-9.-]+",
        "-",
        where.partition("://")[2].partition("@")[2] or where.partition("://")[2],
    )
    folder = folder or holdfast_home() / "telemetry" / name.strip("-")
    attach(trace, where, cluster=cluster, span=span, folder=folder, progress=progress)


def _check_zone(zone: str) -> None:
    try:
        ZoneInfo(zone)
    except (KeyError, ValueError, OSError) as error:
        raise BadUse(
            f"There is no time zone {zone!r}. Give a name of the IANA database, such as Asia/Shanghai."
        ) from error


def _size_bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.glob("*")
    return sum(one.stat().st_size for one in files)
