"""Fetch telemetry from a Prometheus server into a store, in chunks of time.

A server returns at most 11,000 points of a series per answer, and an answer must fit into memory.
The time span is therefore divided into chunks, and the instances are divided into shards if there
are many series. After a chunk is written as Parquet, a file marks it as complete. An interrupted
run continues at the first chunk without such a mark. At the end, the metric becomes visible in the
store, as if it had been converted from files.
"""

import datetime as dt
import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from holdfast.core.atomic import write_atomic
from holdfast.core.errors import BadUse
from holdfast.core.words import plainly
from holdfast.trace.notes import Note
from holdfast.trace.telemetry.long import steps_of
from holdfast.trace.telemetry.metrics import METRICS, Device, Metric, metric_named
from holdfast.trace.telemetry.progress import Progress
from holdfast.trace.telemetry.prometheus_http import (
    MAX_POINTS,
    AnswerTooLarge,
    Prometheus,
    PrometheusSeries,
)
from holdfast.trace.telemetry.store import (
    DAY_US,
    Store,
    finish_metric,
    open_database,
    write_parquet,
)
from holdfast.trace.telemetry.summary import quoted, summary_of_rows
from holdfast.trace.telemetry.values import judged

if TYPE_CHECKING:
    import duckdb

SAMPLES_PER_ANSWER: Final = 400_000
"""Samples requested per answer; they take about 12 MB of JSON and 100 MB of Python objects."""
INSTANCES_PER_SHARD: Final = 200
NODE_LABELS: Final = (
    "Hostname",
    "hostname",
    "node",
    "nodename",
    "kubernetes_node",
    "instance",
    "target",
)
"""Labels that may name the node, the most likely label first; a port in the value is cut off."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A time span with a step. Times are seconds since the epoch, and both ends are included."""

    start_s: float
    end_s: float
    step_s: float = 15.0

    def __post_init__(self) -> None:
        if not (self.step_s > 0 and self.start_s <= self.end_s and math.isfinite(self.end_s)):
            raise BadUse(
                f"From {self.start_s} to {self.end_s} every {self.step_s} s is not a span of time. "
                "Give a start, a later end and a positive step."
            )

    @classmethod
    def of(cls, start: str, end: str, *, step_s: float = 15.0) -> "Span":
        """Parse ISO 8601 times; a time without an offset is in UTC.

        Raises:
            BadUse: a text is not a time, or the end is before the start.
        """
        try:
            times = [dt.datetime.fromisoformat(text) for text in (start, end)]
        except ValueError as error:
            raise BadUse(f"{error}. Give times like 2023-07-01T00:00:00Z.") from error
        first, last = [time if time.tzinfo else time.replace(tzinfo=dt.UTC) for time in times]
        return cls(start_s=first.timestamp(), end_s=last.timestamp(), step_s=step_s)

    def chunks(self, points: int) -> list["Span"]:
        """Divide the time span into spans of at most `points` points each."""
        number = int((self.end_s - self.start_s) / self.step_s + 1e-9) + 1
        return [
            replace(
                self,
                start_s=self.start_s + first * self.step_s,
                end_s=self.start_s + (min(first + points, number) - 1) * self.step_s,
            )
            for first in range(0, number, points)
        ]


def fetch(
    server: Prometheus,
    folder: Path | str,
    span: Span,
    *,
    metrics: Sequence[str] | None = None,
    matchers: str = "",
    expressions: dict[str, str] | None = None,
    progress: Progress | None = None,
) -> Store:
    """Fetch metrics into a store.

    Metrics that the store already has are skipped, and incomplete ones are continued.

    Args:
        server: the Prometheus server.
        folder: the store; created if it does not exist.
        span: the time span to fetch.
        metrics: names in `metrics.METRICS`; None means all metrics that the server has.
        matchers: further conditions on every series in PromQL, such as
            `cluster="a",modelName=~"H100.*"`.
        expressions: for some metrics, PromQL in place of the default; may contain `$matchers` and
            `$window`.
        progress: called with the number of chunks done and the total.

    Raises:
        BadUse: a metric is unknown, the server refuses a request, or the store contains part of a
            different fetch of the metric.
        PrometheusError: the server does not answer; chunks fetched so far are kept.
    """
    store = Store.to_be(Path(folder))  # The folder is created after the server has answered.
    with open_database() as connection:
        for metric in _wanted(metrics):
            if not store.manifest(metric):
                expression = (expressions or {}).get(metric.name) or _expression(metric)
                job = _Fetch(store, server, metric, expression, matchers, span, connection)
                if job.plan(always=metrics is not None):
                    job.run(progress)
    return Store.create(store.folder)


def _wanted(names: Sequence[str] | None) -> list[Metric]:
    if names is None:
        return [metric for metric in METRICS.values() if metric.name != "CPU_SERVER_POWER"]
    found = [metric_named(name) for name in names]
    if None in found:
        raise BadUse(
            f"There is no metric {names[found.index(None)]!r}. Known: {', '.join(METRICS)}."
        )
    return [one[0] for one in found if one]


def _expression(metric: Metric) -> str:
    """Return the PromQL of a metric with the placeholders `$matchers` and `$window`."""
    factor = f"{metric.coarse[1]:g} * " if metric.coarse and metric.dcgm else ""
    return metric.promql or f"{factor}{metric.dcgm}{{$matchers}}"


class _Fetch:
    """Fetch one metric, from the plan to the finished store."""

    def __init__(
        self,
        store: Store,
        server: Prometheus,
        metric: Metric,
        expression: str,
        matchers: str,
        span: Span,
        connection: "duckdb.DuckDBPyConnection",
    ) -> None:
        self._store, self._server, self._metric, self._connection = (
            store,
            server,
            metric,
            connection,
        )
        self._template, self._matchers, self._span = expression, matchers, span
        self._building = store.folder / "samples" / f".metric={metric.name}.fetch"
        self._shards: list[str] = [""]
        self._points = MAX_POINTS

    def plan(self, *, always: bool) -> bool:
        """Plan the chunks and shards, or read an earlier plan.

        Returns:
            True if there is something to fetch.
        """
        path = self._building / "plan.json"
        described = {
            "url": self._server.url,
            "query": self._template,
            "matchers": self._matchers,
            **asdict(self._span),
        }
        if path.exists():
            plan = json.loads(path.read_text())
            if plan["asked"] != described:
                raise BadUse(
                    f"{self._building} holds part of another fetch of {self._metric.name}. "
                    "Repeat that one to finish it, or remove the folder."
                )
            self._shards, self._points = plan["shards"], plan["points"]
            return True
        # Series come and go; the middle and both ends give the approximate number at a time.
        times = (self._span.start_s, (self._span.start_s + self._span.end_s) / 2, self._span.end_s)
        series = max(self._server.number_at(f"count({self._query('')})", at_s) for at_s in times)
        if not series and not always:
            return False
        self._shards = self._instances()
        each = max(1, math.ceil(series / len(self._shards)))
        self._points = max(1, min(MAX_POINTS, SAMPLES_PER_ANSWER // each))
        Store.create(self._store.folder)
        shutil.rmtree(self._building, ignore_errors=True)
        self._building.mkdir(parents=True)
        plan = {"asked": described, "shards": self._shards, "points": self._points}
        write_atomic(path, json.dumps(plan).encode())
        return True

    def run(self, progress: Progress | None) -> None:
        """Fetch the missing chunks, and finish the metric."""
        chunks = [
            (shard, chunk) for chunk in self._span.chunks(self._points) for shard in self._shards
        ]
        for number, (shard, chunk) in enumerate(chunks):
            mark = self._building / f"chunk-{number:06}.json"
            if not mark.exists():
                write_atomic(mark, json.dumps(self._fetch_chunk(number, shard, chunk)).encode())
            if progress:
                progress(f"Fetching {self._metric.name}", number + 1, len(chunks))
        self._finish()

    def _query(self, shard: str) -> str:
        matchers = ",".join(part for part in (self._matchers, shard) if part)
        # A rate over four points of a counter tolerates a lost scrape (Prometheus' own advice).
        window = f"{max(60, math.ceil(4 * self._span.step_s))}s"
        query = self._template.replace("$window", window)
        if "$matchers" in query:
            return re.sub(r",?\s*\$matchers", lambda found: _joined(found.group(), matchers), query)
        return query

    def _instances(self) -> list[str]:
        """Return one matcher for each shard of the instances.

        Returns:
            The matchers; [''] if there are few instances, or if the expression has no place for
            matchers.
        """
        selector = re.search(r"[a-zA-Z_:][a-zA-Z0-9_:]*\{[^{}]*\$matchers[^{}]*\}", self._template)
        if not selector:
            return [""]
        chosen = re.sub(
            r",?\s*\$matchers",
            lambda found: _joined(found.group(), self._matchers),
            selector.group(),
        )
        instances = self._server.label_values(
            "instance", chosen, start_s=self._span.start_s, end_s=self._span.end_s
        )
        if len(instances) <= INSTANCES_PER_SHARD:
            return [""]
        return [
            f"instance=~{json.dumps('|'.join(map(re.escape, instances[first : first + INSTANCES_PER_SHARD])))}"
            for first in range(0, len(instances), INSTANCES_PER_SHARD)
        ]

    def _fetch_chunk(self, number: int, shard: str, chunk: Span) -> dict[str, Any]:
        """Write a chunk's samples; return the content of the file that marks it as complete."""
        dropped = {"sentinel": 0, "out-of-range": 0, "missing": 0}
        devices, at_us, values = [], [], []
        for series in self._answers(shard, chunk):
            kept = _kept(self._metric, series, dropped)
            devices.append(device_of(series.labels, self._metric))
            at_us.append(series.at_us[kept])
            values.append(series.values[kept])
        if not devices:
            return {"samples": 0, "dropped": dropped}
        ids = self._store.with_devices(self._connection, devices)
        columns = {
            "at": np.concatenate(at_us).astype("datetime64[us]"),
            "device": np.repeat(ids.astype(np.int32), [len(one) for one in at_us]),
            "value": np.concatenate(values).astype(np.float32),
        }
        days = columns["at"].astype(np.int64) // DAY_US
        for day in np.unique(days).tolist():
            place = self._building / f"date={np.datetime64(day, 'D')}"
            place.mkdir(exist_ok=True)
            of_day = {name: column[days == day] for name, column in columns.items()}
            # If two series belong to the same device, for example after a pod label changed, keep
            # one sample per time.
            select = (
                'SELECT arriving."at", device, max(value) AS value FROM arriving '
                'GROUP BY arriving."at", device ORDER BY device, arriving."at"'
            )
            write_parquet(self._connection, select, of_day, place / f"part-{number:06}.parquet")
        return {"samples": len(days), "dropped": dropped}

    def _answers(self, shard: str, chunk: Span) -> Iterator[PrometheusSeries]:
        try:
            yield from self._server.range(
                self._query(shard), start_s=chunk.start_s, end_s=chunk.end_s, step_s=chunk.step_s
            )
        except AnswerTooLarge:
            points = round((chunk.end_s - chunk.start_s) / chunk.step_s) + 1
            if points == 1:
                raise BadUse(
                    f"One point of {self._metric.name} is more than an answer may hold. Ask for fewer series at a "
                    "time with matchers."
                ) from None
            for half in chunk.chunks((points + 1) // 2):
                yield from self._answers(shard, half)

    def _finish(self) -> None:
        marks = [
            json.loads(path.read_text()) for path in sorted(self._building.glob("chunk-*.json"))
        ]
        rows = f'SELECT "at", device, value FROM read_parquet({quoted(f"{self._building}/date=*/part-*.parquet")})'
        if not any(mark["samples"] for mark in marks):
            raise BadUse(
                f"{self._server.url} has no samples of {self._metric.name} in that time "
                f"({self._query('')}). Correct the time, the matchers or the expression."
            )
        notes = list(self._notes(marks))
        notes += [
            note
            for notes_of in steps_of(self._connection, rows, self._metric.name, "")
            for note in notes_of
        ]
        summary = summary_of_rows(
            self._connection, self._metric, rows, self._store.devices(self._connection), notes
        )
        sources = [{"url": self._server.url, "query": self._query(""), **asdict(self._span)}]
        finish_metric(
            self._store,
            self._metric,
            self._building,
            self._connection,
            summary.tables,
            sources,
            notes,
        )

    def _notes(self, marks: list[dict[str, Any]]) -> Iterator[Note]:
        for reason, sentence in (
            ("sentinel", "held DCGM's marker for no value."),
            (
                "out-of-range",
                f"lay outside {self._metric.low:g} to {self._metric.high:g} {self._metric.unit}.",
            ),
        ):
            if count := sum(mark["dropped"][reason] for mark in marks):
                words = f"{self._metric.name}: {plainly(count, 'sample')} {sentence}"
                yield Note(
                    cluster="",
                    check=f"telemetry-{reason}",
                    sentence=words,
                    rows=count,
                    action="dropped",
                )


def _joined(found: str, matchers: str) -> str:
    """Return the text to put in place of `$matchers`, with a comma before it if needed."""
    return f"{',' if found.startswith(',') and matchers else ''}{matchers}"


def device_of(labels: Any, metric: Metric) -> Device:
    """Return the device of a series, from the labels of dcgm-exporter.

    A MIG instance is a device of its own.
    """
    node = next((labels[label] for label in NODE_LABELS if labels.get(label)), "unknown")
    node = re.sub(r":\d+$", "", node)
    if metric.kind == "node" or "gpu" not in labels:
        return Device(node, node, None)
    part = f"/{labels['GPU_I_ID']}" if labels.get("GPU_I_ID") else ""
    gpu = int(labels["gpu"]) if labels["gpu"].isdigit() else None
    return Device(f"{node}-{labels['gpu']}{part}", node, gpu)


def _kept(metric: Metric, series: PrometheusSeries, dropped: dict[str, int]) -> Any:
    """Return a mask of a series' valid samples; count the others by reason in `dropped`."""
    kept = np.ones(len(series.values), dtype=bool)
    wrong = ~((series.values >= metric.low) & (series.values <= metric.high))
    for place in np.flatnonzero(wrong).tolist():
        _, reason = judged(metric, float(series.values[place]))
        if reason:
            kept[place] = False
            dropped[reason] += 1
    return kept
