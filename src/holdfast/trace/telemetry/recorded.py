"""Read samples from the text output of tools.

The tools are nvidia-smi, dcgmi dmon, Prometheus (saved answers), exporters (exposition text), and
any program that writes long CSV. `form_of` recognises the format of a file. A sample consists of
seconds since the Unix epoch, the device, the tool's name of the metric, and the value.

A time without an offset is in UTC. `dcgmi dmon` and exposition text contain no times. Their last
samples get the file's modification time. The samples of dmon are taken to be one second apart,
which is dmon's default. The report states how times were read.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.plain_text import csv_header, head, opened_text
from holdfast.trace.telemetry.wide_csv import TIME_NAMES, parse_time

Sample = tuple[float, str, str, float | None]
"""Time in s since the Unix epoch, device, metric as the tool names it, value."""

_VALUE_NAMES: Final = frozenset({"value", "val"})
_METRIC_NAMES: Final = frozenset({"metric", "__name__", "metric_name"})
_NODE_NAMES: Final = ("hostname", "node", "host", "instance")
_GPU_NAMES: Final = ("gpu", "index", "gpu_index", "gpu_id", "minor_number")
_DEVICE_NAMES: Final = ("device", "device_name", "series", "uuid", "gpu_uuid", "name")
_SMI_METRICS: Final = {
    "utilization.gpu": "GPU_UTIL", "utilization.memory": "MEM_COPY_UTIL", "memory.used": "FB_USED",
    "memory.free": "FB_FREE", "temperature.gpu": "GPU_TEMP", "temperature.memory": "MEMORY_TEMP",
    "power.draw": "POWER_USAGE", "power.draw.instant": "POWER_USAGE", "clocks.sm": "SM_CLOCK",
    "clocks.current.sm": "SM_CLOCK", "clocks.mem": "MEM_CLOCK", "clocks.current.memory": "MEM_CLOCK",
}  # fmt: skip
_DMON_METRICS: Final = {
    "GPUTL": "GPU_UTIL", "MCUTL": "MEM_COPY_UTIL", "POWER": "POWER_USAGE", "TMPTR": "GPU_TEMP", "MMTMP": "MEMORY_TEMP",
    "SMCLK": "SM_CLOCK", "MMCLK": "MEM_CLOCK", "FBUSD": "FB_USED", "FBFRE": "FB_FREE",
    "SMACT": "DCGM_FI_PROF_SM_ACTIVE", "SMOCC": "DCGM_FI_PROF_SM_OCCUPANCY",
    "TENSO": "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DRAMA": "DCGM_FI_PROF_DRAM_ACTIVE",
}  # fmt: skip
"""Short names of dcgmi's columns. Profiling metrics are ratios, as in dcgm-exporter."""
_SMI_COLUMN: Final = re.compile(r"([a-z_.]+)(?: \[[^\]]*\])?")
_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_EXPOSED: Final = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+(-?\d+))?\s*$")
_LABEL: Final = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_DMON_ROW: Final = re.compile(r"\s*GPU\s+(\d+)\s+(.*)")
_DMON_STEP_S: Final = 1.0
_NEXT_STEP: Final = "Correct or delete that line, or fetch the file again if it was cut off."


def form_of(path: Path) -> str | None:
    """Return the format of a file as a key of `READERS`; None if it has none of these formats."""
    start = head(path).lstrip("\ufeff")
    if re.match(r"#\s*Entity\b", start.lstrip()) or _DMON_ROW.match(start):
        return "dmon"
    if start.lstrip().startswith("{"):
        return "answer" if '"resultType"' in start else None
    header = [name.lower() for name in csv_header(path)]
    if not set(_smi_columns(header)).isdisjoint(_SMI_METRICS) and "timestamp" in header:
        return "nvidia-smi"
    names = frozenset(header)
    identifies = names & {*_NODE_NAMES, *_GPU_NAMES, *_DEVICE_NAMES}
    if names & (TIME_NAMES - {""}) and names & _VALUE_NAMES and identifies:
        return "long"
    lines = [line for line in start.splitlines()[:40] if line.strip() and not line.startswith("#")]
    if lines and "," not in lines[0].partition("{")[0] and _EXPOSED.match(lines[0]):
        return "exposition"
    return None


def samples_of(path: Path, form: str) -> Iterator[Sample]:
    """Yield the samples in a file.

    Raises:
        BadTrace: a sample cannot be read; the message has the line and the expected form.
    """
    return READERS[form](path)


def remark_of(form: str) -> str:
    """Return a note for the report about how times were read; empty if the file contains times."""
    return {
        "dmon": "dcgmi dmon writes no times; its samples were taken to end when the file was last changed, 1 s apart.",
        "exposition": "samples without a time were taken to be of the moment when the file was last changed.",
    }.get(form, "")


def _smi_columns(header: list[str]) -> list[str]:
    return [match[1] if (match := _SMI_COLUMN.fullmatch(name)) else name for name in header]


def _of_nvidia_smi(path: Path) -> Iterator[Sample]:
    """Read `nvidia-smi --query-gpu=timestamp,index,… --format=csv`, with or without units.

    The name of the file is taken as the name of the node.
    """
    header = _smi_columns([name.lower() for name in csv_header(path)])
    at = header.index("timestamp")
    who = next(
        (header.index(name) for name in ("index", "uuid", "gpu_uuid", "pci.bus_id", "serial") if name in header), None
    )  # fmt: skip
    if who is None:
        raise BadTrace(
            path, "no column identifies the GPU of a row.", line=1,
            next_step="Query with index: nvidia-smi --query-gpu=timestamp,index,utilization.gpu --format=csv -l 15",
        )  # fmt: skip
    measured = [
        (place, _SMI_METRICS[name]) for place, name in enumerate(header) if name in _SMI_METRICS
    ]
    for line, row in _rows(path, len(header)):
        at_s = _time(path, line, row[at].replace("/", "-"))
        index = row[who].strip()
        device = f"{path.name.partition('.')[0]}-{index}" if index.isdecimal() else index
        for place, metric in measured:
            match = _NUMBER.match(
                row[place].strip()
            )  # "[N/A]" and "[Not Supported]" are not numbers.
            yield at_s, device, metric, float(match[0]) if match else None


def _of_long_csv(path: Path) -> Iterator[Sample]:
    """Read a CSV file with one row per sample.

    The columns are time, value, the device (by name, or by node and GPU), and optionally the
    metric.
    """
    header = [name.lower() for name in csv_header(path)]
    place = {name: header.index(name) for name in header}

    def first(names: Any) -> int | None:
        return next((place[name] for name in names if name in place), None)

    at, value, metric = (
        first(sorted(TIME_NAMES)),
        first(sorted(_VALUE_NAMES)),
        first(sorted(_METRIC_NAMES)),
    )
    node, gpu, device = first(_NODE_NAMES), first(_GPU_NAMES), first(_DEVICE_NAMES)
    assert at is not None, "form_of saw it"
    assert value is not None, "form_of saw it"
    for line, row in _rows(path, len(header)):
        named = "" if metric is None else row[metric]
        text = row[value].strip()
        if text and not _NUMBER.fullmatch(text) and text.lower() != "nan":
            raise BadTrace(
                path,
                f"{text[:40]!r} is not a number.",
                line=line,
                column=header[value],
                next_step=_NEXT_STEP,
            )
        number = float(text) if text else None
        parts = (row[place].strip() for place in (node, gpu) if place is not None)
        who = row[device].strip() if device is not None and gpu is None else "-".join(parts)
        yield _time(path, line, row[at]), who, named, number


def _of_dmon(path: Path) -> Iterator[Sample]:
    """Read the output of `dcgmi dmon -e …`: a table with a row per GPU, printed repeatedly."""
    columns: list[str] = []
    rounds: list[list[tuple[str, list[str]]]] = []
    seen: set[str] = set()
    with opened_text(path) as file:
        for line, text in enumerate(file, start=1):
            if text.lstrip("# ").startswith("Entity"):
                columns = text.lstrip("# ").split()[1:]
            elif match := _DMON_ROW.match(text):
                if not columns:
                    raise BadTrace(
                        path,
                        "expected the line of the columns first.",
                        line=line,
                        next_step=_NEXT_STEP,
                    )
                if not rounds or match[1] in seen:
                    rounds.append([])
                    seen = set()
                seen.add(match[1])
                rounds[-1].append((match[1], match[2].split()))
    ended_s = path.stat().st_mtime
    for number, rows in enumerate(rounds):
        at_s = ended_s - (len(rounds) - 1 - number) * _DMON_STEP_S
        for gpu, cells in rows:
            for name, cell in zip(columns, cells, strict=False):
                if name in _DMON_METRICS:
                    value = float(cell) if _NUMBER.fullmatch(cell) else None
                    yield at_s, f"{path.name.partition('.')[0]}-{gpu}", _DMON_METRICS[name], value


def _of_answer(path: Path) -> Iterator[Sample]:
    """Read a saved answer of Prometheus' HTTP API to `query_range` or `query`."""
    try:
        with opened_text(path) as file:
            answer = json.load(file)
        yield from _of_series(answer["data"]["result"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        problem = f"expected an answer of Prometheus, series with values: {reason}."
        next_step = "Save the whole answer of query_range, to a query of plain samples."
        raise BadTrace(path, problem, next_step=next_step) from None


def _of_series(series: list[dict[str, Any]]) -> Iterator[Sample]:
    for one in series:
        labels = one.get("metric") or {}
        for at_s, text in one.get("values") or [one["value"]]:
            value = None if text in ("NaN", "+Inf", "-Inf") else float(text)
            yield float(at_s), _device_of(labels), labels.get("__name__", ""), value


def _of_exposition(path: Path) -> Iterator[Sample]:
    """Read Prometheus' exposition text, as an exporter serves it at /metrics.

    The file may contain several scrapes.
    """
    changed_s = path.stat().st_mtime
    with opened_text(path) as file:
        for text in file:
            match = _EXPOSED.match(text) if not text.startswith("#") else None
            if match is None:
                continue
            labels = dict(_LABEL.findall(match[2] or ""))
            value = float(match[3]) if _NUMBER.fullmatch(match[3]) else None
            at_s = int(match[4]) / 1000 if match[4] else changed_s
            yield at_s, _device_of(labels), match[1], value


def _device_of(labels: Mapping[str, str]) -> str:
    lower = {name.lower(): value for name, value in labels.items()}
    node = next((lower[name] for name in _NODE_NAMES if name in lower), "")
    gpu = next((lower[name] for name in _GPU_NAMES if name in lower), "")
    named = "-".join(filter(None, (node, gpu)))
    return named or next((lower[name] for name in _DEVICE_NAMES if name in lower), "unnamed")


def _rows(path: Path, fields: int) -> Iterator[tuple[int, list[str]]]:
    with opened_text(path) as file:
        rows = csv.reader(file, skipinitialspace=True)
        for number, row in enumerate(rows):
            if number == 0 or not row:
                continue
            if len(row) != fields:
                problem = f"{len(row)} fields, where the first line has {fields}."
                raise BadTrace(path, problem, line=rows.line_num, next_step=_NEXT_STEP)
            yield rows.line_num, row


def _time(path: Path, line: int, text: str) -> float:
    try:
        return parse_time(text)[0] / 1e6
    except ValueError:
        raise BadTrace(
            path, f"{text[:40]!r} is not a time stamp.", line=line, next_step=_NEXT_STEP
        ) from None


READERS: Final[Mapping[str, Callable[[Path], Iterator[Sample]]]] = {
    "nvidia-smi": _of_nvidia_smi,
    "long": _of_long_csv,
    "dmon": _of_dmon,
    "answer": _of_answer,
    "exposition": _of_exposition,
}
