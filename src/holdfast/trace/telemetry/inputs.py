"""Find the telemetry in a path, with the format and the metric of each file.

The formats are wide CSV, IPMI, long Parquet, tool output, and stores.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from holdfast.core.errors import BadUse
from holdfast.trace.sources.reading import csv_header
from holdfast.trace.sources.stored import is_store
from holdfast.trace.telemetry.metrics import METRICS, Metric, metric_named
from holdfast.trace.telemetry.recorded import form_of

STORE_MARK: Final = "telemetry.json"
"""The file whose presence makes a folder a converted store."""
SERVER_POWER: Final = "Sys_Total_Power"
"""Column of AcmeTrace's IPMI files that has the power of a whole server."""

_SUFFIXES: Final = frozenset({".csv", ".json", ".parquet", ".prom", ".txt"})

Form = Literal["wide", "ipmi", "long", "recorded", "store"]


@dataclass(frozen=True)
class Given:
    """A telemetry file or a store, with its format and metric."""

    path: Path
    form: Form
    metric: Metric | None = None
    """The metric; None if the rows of the file or the store give it."""
    factor: float | None = 1.0
    """Factor from the file's unit to the metric's unit; None if inferred from the values."""


def telemetry_in(where: Path, *, metric: str | None = None) -> list[Given]:
    """Return the telemetry in a file, or in a folder and its subfolders, sorted by name.

    Args:
        where: a file, a folder as published by AcmeTrace (`GPU_UTIL.csv`, …), or a converted store.
        metric: for a file, its metric if its name does not give one. For a folder, the only metric
            to read.

    Raises:
        BadUse: there is no telemetry, or a file's metric is unknown.
    """
    wanted = metric_named(metric) if metric is not None else None
    if metric is not None and wanted is None:
        raise BadUse(f"There is no metric {metric!r}. Known: {', '.join(METRICS)}.")
    if not where.exists():
        raise BadUse(f"There is no file or folder {where}. Check the path.")
    if where.is_dir() and (where / STORE_MARK).is_file():
        return [Given(where, "store")]
    if where.is_file():
        return [_file(where, metric)]
    if is_store(where):
        raise BadUse(
            f"{where} is a converted trace without telemetry. Convert it again with --metrics, into a new folder."
        )
    files = sorted(
        path for path in where.rglob("*") if path.suffix.lower() in _SUFFIXES and path.is_file()
    )
    found = [
        _file(path, None)
        for path in files
        if path.suffix.lower() == ".parquet"
        or (path.suffix.lower() == ".csv" and metric_named(path.stem))
        or form_of(path)
    ]
    if wanted:
        found = [one for one in found if one.metric in (None, wanted[0])]
    if not found:
        raise BadUse(
            f"{where} holds no telemetry. Give a CSV file named after its metric (GPU_UTIL.csv), a Parquet file, what "
            "nvidia-smi --query-gpu, dcgmi dmon or a Prometheus printed, or a folder of them."
        )
    return found


def _file(path: Path, metric: str | None) -> Given:
    if path.suffix.lower() == ".parquet":
        return Given(path, "long", *(metric_named(metric) or ()) if metric else (None, None))
    named = metric_named(metric or path.stem)
    if form_of(path):
        return Given(path, "recorded", *(named or (None, None)))
    if named is None:
        raise BadUse(
            f"{path}: its name is not the name of a metric. Name it after the metric "
            f"that it holds, such as GPU_UTIL.csv; known are {', '.join(METRICS)}."
        )
    form: Form = "ipmi" if SERVER_POWER in csv_header(path) else "wide"
    return Given(path, form, *named)
