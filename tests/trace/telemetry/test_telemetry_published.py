"""Check that AcmeTrace's published curves and Kalos' real Xid onsets are recovered from files with
them.
"""

import csv
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from holdfast.trace.telemetry import attach, convert, value_counts
from holdfast.trace.trace import Trace, open_scratch

DATA = Path(__file__).parents[3] / "../shared/data"
CURVES, XIDS = DATA / "acme_util", DATA / "acme_kalos_xid" / "xid_onsets.csv"
SHARES = np.linspace(0, 1, 1000)

needs_curves = pytest.mark.skipif(not CURVES.exists(), reason="the published curves are not here")
needs_xids = pytest.mark.skipif(not XIDS.exists(), reason="the published Xid onsets are not here")


def published(name: str) -> np.ndarray:
    with (CURVES / f"{name}.csv").open() as file:
        return np.array([float(row["value"]) for row in csv.DictReader(file)])


def write_wide(path: Path, values: np.ndarray, *, columns: int = 40) -> Path:
    """Write the values in random order, one cell each."""
    cells = np.random.default_rng(0).permutation(values).reshape(-1, columns)
    start = datetime.fromisoformat("2023-07-01T08:00:00+08:00")
    with path.open("w") as file:
        file.write(",".join(["Time", *(f"10.1.0.{index}" for index in range(columns))]) + "\n")
        for number, row in enumerate(cells.tolist()):
            file.write(
                ",".join([str(start + timedelta(seconds=15 * number)), *map(repr, row)]) + "\n"
            )
    return path


@needs_curves
@pytest.mark.parametrize(
    ("name", "metric", "factor", "step"),
    [
        ("util_gpu_seren__GPU_UTIL_pct", "GPU_UTIL", 1, 0.5),
        ("util_gpu_kalos_full__GPU_UTIL_pct", "GPU_UTIL", 1, 0.5),
        ("util_gpu_kalos_full__SM_ACTIVE_pct", "SM_ACTIVE", 1, 0.0005),
        ("util_gpu_seren__SM_ACTIVE_pct", "SM_ACTIVE", 1, 0.0005),
        ("util_gpu_kalos_full__TC_ACTIVITY_pct", "PIPE_TENSOR_ACTIVE", 1, 0.0005),
        ("util_gpu_kalos__FB_USED_pct", "FB_USED", 819.2, 0.5),
        ("util_gpu_seren__FB_USED_pct", "FB_USED", 819.2, 0.5),
        ("gpu_power_seren__GPU_POWER_W", "POWER_USAGE", 1, 0.05),
        ("gpu_power_kalos__GPU_POWER_W", "POWER_USAGE", 1, 0.05),
        ("gpu_temp_seren__GPU_TEMP_C", "GPU_TEMP", 1, 0.5),
        ("gpu_temp_kalos__MEMORY_TEMP_C", "MEMORY_TEMP", 1, 0.5),
        ("util_cpu_mem_seren__CPU_UTIL_pct", "NODE_CPU_UTILIZATION", 1, 0.0005),
        ("util_cpu_mem_kalos__HOST_MEM_pct", "NODE_MEMORY_UTILIZATION", 1, 0.0005),
        ("ib_seren__IB_SEND", "NODE_IB_SEND", 1, 0.05),
        ("server_power__CPU_NODE_POWER_W", "CPU_SERVER_POWER", 1, 0.5),
    ],
)
def test_a_published_curve_comes_back(tmp_path, name, metric, factor, step):
    curve = published(name)
    path = write_wide(tmp_path / f"{metric}.csv", curve * factor)
    found = value_counts(path)
    assert found.total == 1000
    scale = factor * 1e6 if metric.startswith("NODE_IB") else factor
    error = np.abs(found.quantile(SHARES) / scale - curve)
    assert error.max() <= step / factor + 1e-5 * curve.max()


@needs_curves
@pytest.mark.parametrize(
    ("name", "metric", "real"),
    [
        ("util_cpu_mem_kalos__CPU_UTIL_pct", "NODE_CPU_UTILIZATION", lambda value: value <= 100),
        ("server_power__GPU_NODE_POWER_W", "GPU_SERVER_POWER", lambda value: value >= 1),
    ],
)
def test_what_cannot_be_is_dropped_from_a_published_curve(tmp_path, name, metric, real):
    curve = published(name)
    path = write_wide(tmp_path / f"{metric}.csv", curve)
    kept = curve[real(curve)]
    assert len(kept) < 1000
    assert value_counts(path).total == len(kept)
    with scratch_trace() as trace:
        attach(trace, path, cluster="kalos")
        (note,) = [note for note in trace.notes if note.check == "telemetry-out-of-range"]
        assert (note.rows, note.action, note.cluster) == (1000 - len(kept), "dropped", "kalos")


def scratch_trace() -> Trace:
    connection, folder = open_scratch(memory_limit_mb=300)
    return Trace(connection, folder, [], duration="run", has_jobs=False)


def write_gauge(path: Path, onsets: list[tuple[str, datetime, str]], *, zeros: bool) -> set[str]:
    """Write a latched gauge every 15 s around each onset: empty or 0 before, the code afterwards.

    135 gauges are latched from the first sample on. A GPU with a second onset was cleared the day
    before it.
    """
    healthy = "0" if zeros else ""
    gpus = list(dict.fromkeys(gpu for gpu, _, _ in onsets))
    censored = [f"172.31.99.{index}#0" for index in range(135)]
    silent = [f"172.31.98.{index}#1" for index in range(20)]
    times = {at + timedelta(seconds=15 * step) for _, at, _ in onsets for step in (-1, 0, 1)}
    times.add(min(times) - timedelta(seconds=15))
    events: dict[datetime, list[tuple[str, str]]] = {}
    seen: set[str] = set()
    for gpu, at, code in onsets:
        if gpu in seen:
            events.setdefault(at - timedelta(seconds=15), []).append((gpu, healthy))
        events.setdefault(at, []).append((gpu, code))
        seen.add(gpu)
    columns = [*gpus, *censored, *silent]
    state = (
        dict.fromkeys(gpus, healthy)
        | dict.fromkeys(censored, "43")
        | dict.fromkeys(silent, healthy)
    )
    with path.open("w") as file:
        file.write(",".join(["Time", *columns]) + "\n")
        for at in sorted(times):
            state |= dict(events.get(at, []))
            file.write(",".join([str(at), *(state[name] for name in columns)]) + "\n")
    return set(censored)


@needs_xids
@pytest.mark.parametrize("zeros", [False, True])
def test_kalos_852_xid_onsets_come_back(tmp_path, zeros):
    with XIDS.open() as file:
        onsets = [
            (row["gpu"], datetime.fromisoformat(row["t"]), row["code"])
            for row in csv.DictReader(file)
        ]
    write_gauge(tmp_path / "XID_ERRORS.csv", onsets, zeros=zeros)
    expected = {(gpu, at.astimezone(tz=None).timestamp(), int(code)) for gpu, at, code in onsets}
    store = convert(tmp_path / "XID_ERRORS.csv", tmp_path / "store")
    for where in (tmp_path / "XID_ERRORS.csv", store.folder):
        with scratch_trace() as trace:
            attach(trace, where, cluster="kalos")
            found = trace.query(
                "SELECT d.name, d.node, d.gpu, epoch(o.at) AS at_s, o.code FROM agg_xid_onsets o "
                "JOIN devices d USING (cluster, device)"
            )
            assert len(found) == 852
            assert {(name, at_s, code) for name, _, _, at_s, code in found.rows()} == expected
            assert Counter(found["code"].tolist()) == {43: 794, 31: 55, 94: 2, 45: 1}
            assert len(set(found["node"].tolist())) == 142
            assert {f"{node}#{gpu}" for _, node, gpu, _, _ in found.rows()} == {
                gpu for gpu, _, _ in expected
            }


@needs_xids
def test_xid_onsets_by_sql_over_the_samples_are_the_same(tmp_path):
    with XIDS.open() as file:
        onsets = [
            (row["gpu"], datetime.fromisoformat(row["t"]), row["code"])
            for row in csv.DictReader(file)
        ]
    write_gauge(tmp_path / "XID_ERRORS.csv", onsets, zeros=False)
    store = convert(tmp_path / "XID_ERRORS.csv", tmp_path / "store")
    with scratch_trace() as trace:
        attach(trace, store.folder, cluster="kalos")
        streamed = set(trace.aggregate("xid_onsets").rows())
        from holdfast.trace import aggregates

        trace.adopt("xid_onsets", aggregates.sql("xid_onsets"))
        assert set(trace.aggregate("xid_onsets").rows()) == streamed
        assert len(streamed) == 852
