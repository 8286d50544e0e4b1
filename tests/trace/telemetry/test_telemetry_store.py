"""Check the converted store: equal to the file, whole or absent after kill -9, and resumable."""

import json
import os
import random
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import duckdb
import numpy as np
import pytest
from killed_writing import killed_after_writing

from holdfast.core.errors import BadUse
from holdfast.trace import aggregates
from holdfast.trace.errors import BadTrace
from holdfast.trace.telemetry import attach, convert, value_counts
from holdfast.trace.telemetry.store import Store
from holdfast.trace.telemetry.wide_csv import blocks
from holdfast.trace.trace import Trace, open_scratch

NAMES = ("metric_values", "metric_hours", "metric_devices", "xid_onsets")


def scratch_trace() -> Trace:
    connection, folder = open_scratch(memory_limit_mb=300)
    return Trace(connection, folder, [], duration="run", has_jobs=False)


def write_wide(
    path: Path, *, rows: int, devices: int, seed: int, start: str = "2023-07-01T20:00:00+08:00"
) -> Path:
    rng = random.Random(seed)
    first = datetime.fromisoformat(start)
    xid = path.stem == "XID_ERRORS"
    with path.open("w") as file:
        file.write(
            ",".join(["Time", *(f"10.0.{index // 8}.1-{index % 8}" for index in range(devices))])
            + "\n"
        )
        state = [rng.choice(["", "43"]) for _ in range(devices)]
        for number in range(rows):
            if xid:
                state = [
                    rng.choice(["", "43", "31", "9223372036854775794"])
                    if rng.random() < 0.1
                    else one
                    for one in state
                ]
                cells = state
            else:
                cells = [
                    rng.choice(["", "0.0", "100.0", "55.5", "3", "644245923"])
                    for _ in range(devices)
                ]
            file.write(f"{first + timedelta(seconds=15 * number)},{','.join(cells)}\n")
    return path


def rows_of(trace: Trace, name: str) -> list[tuple]:
    return sorted(trace.aggregate(name).rows(), key=str)


def close_to(found: list[tuple], expected: list[tuple]) -> bool:
    """Compare for equality, with a tolerance for the order of float sums."""
    return len(found) == len(expected) and all(
        left == right or (isinstance(left, float) and left == pytest.approx(right, rel=1e-12))
        for one, other in zip(found, expected, strict=True)
        for left, right in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("metric", ["GPU_TEMP", "XID_ERRORS"])
def test_file_store_and_sql_agree(tmp_path, metric):
    path = write_wide(tmp_path / f"{metric}.csv", rows=1500, devices=19, seed=1)
    store = convert(path, tmp_path / "store")
    with scratch_trace() as direct, scratch_trace() as stored:
        attach(direct, path, cluster="seren")
        attach(stored, store.folder, cluster="seren")
        for name in NAMES:
            assert rows_of(stored, name) == rows_of(direct, name), name
        assert len(rows_of(direct, "metric_values")) > 2
        assert stored.notes == direct.notes
        assert {note.check for note in direct.notes} >= {
            "GPU_TEMP": {"telemetry-out-of-range", "telemetry-gap"}, "XID_ERRORS": {"telemetry-sentinel"},
        }[metric]  # fmt: skip
        assert direct.metrics == stored.metrics == {metric}
        for name in NAMES:
            stored.adopt(name, aggregates.sql(name))  # from now on by the view `samples`
            assert close_to(rows_of(stored, name), rows_of(direct, name)), name


def test_samples_are_the_cells_of_the_file(tmp_path):
    path = write_wide(tmp_path / "GPU_TEMP.csv", rows=700, devices=10, seed=2)
    lines = [line.split(",") for line in path.read_text().splitlines()]
    expected = {
        (datetime.fromisoformat(line[0]).astimezone(UTC).replace(tzinfo=None), name, float(cell))
        for line in lines[1:]
        for name, cell in zip(lines[0][1:], line[1:], strict=True)
        if cell and float(cell) < 1000
    }
    store = convert(path, tmp_path / "store")
    with scratch_trace() as trace:
        attach(trace, store.folder, cluster="seren")
        found = trace.query(
            "SELECT s.at, d.name, s.value FROM samples s JOIN devices d USING (cluster, device)"
        )
        times = found["at"].astype("datetime64[us]").tolist()
        assert (
            set(zip(times, found["name"].tolist(), found["value"].tolist(), strict=True))
            == expected
        )
        assert len(found) == len(expected)
    days = sorted(
        path.name for path in (store.folder / "samples" / "metric=GPU_TEMP").glob("date=*")
    )
    assert days == ["date=2023-07-01"]
    assert duckdb.sql(
        'SELECT column_type FROM (DESCRIBE SELECT "at", device, value '
        f"FROM '{store.folder}/samples/*/date=*/*.parquet')"
    ).fetchall() == [("TIMESTAMP",), ("INTEGER",), ("FLOAT",)]


def test_a_folder_of_months_and_metrics_adds_up(tmp_path):
    (tmp_path / "kalos").mkdir()
    july = write_wide(tmp_path / "kalos" / "GPU_TEMP-2023-07.csv", rows=300, devices=6, seed=3)
    august = write_wide(
        tmp_path / "kalos" / "GPU_TEMP-2023-08.csv",
        rows=200,
        devices=9,
        seed=4,
        start="2023-08-01T00:00:00+08:00",
    )
    write_wide(tmp_path / "kalos" / "MEMORY_TEMP.csv", rows=50, devices=6, seed=5)
    (tmp_path / "kalos" / "notes.csv").write_text("a,b\n1,2\n")
    store = convert(tmp_path / "kalos", tmp_path / "store")
    assert [metric.name for metric in store.metrics()] == ["GPU_TEMP", "MEMORY_TEMP"]
    both = value_counts(july).total + value_counts(august).total
    for where in (tmp_path / "kalos", store.folder):
        assert value_counts(where, "GPU_TEMP").total == both
        with pytest.raises(BadUse, match="holds GPU_TEMP, MEMORY_TEMP"):
            value_counts(where)
        with pytest.raises(BadUse, match=r"has no GPU_UTIL|holds no telemetry"):
            value_counts(where, "GPU_UTIL")
        with scratch_trace() as trace:
            attach(trace, where, cluster="kalos", metric="MEMORY_TEMP")
            assert trace.metrics == {"MEMORY_TEMP"}
        with scratch_trace() as trace:
            attach(trace, where, cluster="kalos")
            table = trace.aggregate("metric_values").where(metric="GPU_TEMP")
            assert table["n"].sum() == both
            assert len(table) == len(set(table["value"].tolist()))
            assert trace.query("SELECT count(*) AS n FROM devices")["n"][0] == 9


def test_progress_is_told_to_the_last_byte(tmp_path):
    (tmp_path / "kalos").mkdir()
    names = ("GPU_TEMP", "FB_USED")
    files = [
        write_wide(tmp_path / "kalos" / f"{name}.csv", rows=90, devices=3, seed=1) for name in names
    ]
    told: list[tuple[str, float, float | None]] = []
    convert(tmp_path / "kalos", tmp_path / "store", progress=lambda *what: told.append(what))
    total = sum(path.stat().st_size for path in files)
    assert {name for name, _, _ in told} == {"Reading GPU_TEMP.csv", "Reading FB_USED.csv"}
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    heads = sum(len(path.read_bytes().splitlines()[0]) + 1 for path in files)
    assert told[-1][1:] == (total - heads, total)


def test_two_clusters_keep_apart(tmp_path):
    path = write_wide(tmp_path / "GPU_TEMP.csv", rows=30, devices=4, seed=6)
    store = convert(path, tmp_path / "store")
    with scratch_trace() as trace:
        attach(trace, path, cluster="a")
        attach(trace, store.folder, cluster="b")
        table = trace.aggregate("metric_devices")
        assert [len(table.where(cluster=name)) for name in "ab"] == [4, 4]
        devices = trace.query(
            "SELECT cluster, device, name, node, gpu FROM devices ORDER BY device"
        )
        assert devices["device"].tolist() == list(range(8))
        assert devices["gpu"].tolist() == [0, 1, 2, 3] * 2
        of_b = trace.query("SELECT DISTINCT cluster, device FROM samples")
        assert set(of_b.rows()) == {("b", device) for device in range(4, 8)}


def test_a_metric_of_nodes_has_no_gpu(tmp_path):
    path = tmp_path / "NODE_CPU_UTILIZATION.csv"
    path.write_text(
        "Time,node-12,10.1.0.3\n2023-07-01 00:00:00,1.5,2.5\n2023-07-01 00:00:15,3.5,\n"
    )
    store = convert(path, tmp_path / "store")
    for where in (path, store.folder):
        with scratch_trace() as trace:
            attach(trace, where, cluster="a")
            rows = trace.query(
                "SELECT name, node, gpu FROM devices WHERE gpu IS NULL ORDER BY name"
            )
            assert rows["node"].tolist() == ["10.1.0.3", "node-12"]


def test_converting_again_reads_nothing_again(tmp_path):
    path = write_wide(tmp_path / "GPU_TEMP.csv", rows=30, devices=4, seed=7)
    store = convert(path, tmp_path / "store")
    before = {part: part.stat().st_mtime_ns for part in store.folder.rglob("*.parquet")}
    convert(path, tmp_path / "store")
    assert {part: part.stat().st_mtime_ns for part in store.folder.rglob("*.parquet")} == before
    write_wide(path, rows=31, devices=4, seed=7)
    with pytest.raises(BadUse, match="from other files, or they have changed"):
        convert(path, tmp_path / "store")


def test_a_bad_file_leaves_nothing_of_its_metric(tmp_path):
    path = write_wide(tmp_path / "GPU_TEMP.csv", rows=30, devices=4, seed=8)
    path.write_text(path.read_text() + "2023-07-01 20:30:00+08:00,1,2,warm,4\n")
    with pytest.raises(BadTrace, match="'warm' is not a number"):
        convert(path, tmp_path / "store")
    assert list((tmp_path / "store" / "samples").iterdir()) == []
    assert Store.open(tmp_path / "store").metrics() == []


def test_a_folder_of_other_things_is_not_touched(tmp_path):
    path = write_wide(tmp_path / "GPU_TEMP.csv", rows=3, devices=4, seed=9)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("...")
    with pytest.raises(BadUse, match="nor a telemetry store"):
        convert(path, tmp_path / "mine")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "telemetry.json").write_text(
        json.dumps({"schema": "holdfast-telemetry", "version": 99})
    )
    with pytest.raises(BadUse, match="store of version 99"):
        value_counts(tmp_path / "old")


CONVERT = """
from holdfast.trace.telemetry import convert
store.PART_SAMPLES = 500
convert(sys.argv[1], sys.argv[2])
"""


def test_kill_9_anywhere_leaves_each_metric_whole_or_absent(tmp_path):
    source = tmp_path / "acme"
    source.mkdir()
    for seed, metric in enumerate(("GPU_TEMP", "MEMORY_TEMP")):
        write_wide(source / f"{metric}.csv", rows=300, devices=5, seed=seed)
    whole = convert(source, tmp_path / "whole")
    expected = {
        metric.name: value_counts(whole.folder, metric.name).total for metric in whole.metrics()
    }
    died = 0
    folder = tmp_path / "store"
    for step in (1, 3, 6, 8, 2, 6):
        died += killed_after_writing(step, "store", CONVERT, source, folder)
        if (folder / "telemetry.json").exists():
            for metric in Store.open(folder).metrics():
                assert value_counts(folder, metric.name).total == expected[metric.name]
                (samples,) = duckdb.sql(
                    f"SELECT count(*) FROM '{folder}/samples/metric={metric.name}/date=*/*.parquet'"
                ).fetchall()[0]
                assert samples == expected[metric.name]
    assert died == 6
    convert(source, folder)
    assert {
        metric.name: value_counts(folder, metric.name).total
        for metric in Store.open(folder).metrics()
    } == expected
    assert list((folder / "samples").glob(".*")) == []


def test_a_repeated_time_found_late_is_not_written_twice(tmp_path, monkeypatch):
    """Threads that find at the end that their parts overlap begin again."""
    path = write_wide(tmp_path / "GPU_TEMP.csv", rows=600, devices=7, seed=10)
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([header, *lines[:500], lines[3], *lines[500:]]) + "\n")
    monkeypatch.setattr("holdfast.trace.telemetry.scan.PART_BYTES", 4000)
    monkeypatch.setattr("holdfast.trace.telemetry.store.PART_SAMPLES", -1)  # every block is a part
    monkeypatch.setattr("holdfast.trace.telemetry.scan.blocks", partial(blocks, block_bytes=1000))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    store = convert(path, tmp_path / "store")
    (samples,) = duckdb.sql(
        f"SELECT count(*) FROM '{store.folder}/samples/*/date=*/*.parquet'"
    ).fetchall()[0]
    assert samples == value_counts(path).total == value_counts(store.folder).total
    assert samples == sum(
        cell not in ("", "644245923") for line in lines for cell in line.split(",")[1:]
    )


# Long sources.


def write_long(path: Path, select: str) -> Path:
    duckdb.sql(f"COPY ({select}) TO '{path}' (FORMAT parquet)")
    return path


def test_long_parquet_with_exporter_labels(tmp_path):
    path = write_long(
        tmp_path / "dcgm.parquet",
        "SELECT '2023-07-01 00:00:00'::TIMESTAMP + to_seconds(15 * i) AS time, metric AS __name__, "
        "'node' || (g // 8) AS Hostname, g % 8 AS gpu, "
        "CASE WHEN metric = 'DCGM_FI_PROF_SM_ACTIVE' THEN (i % 5) / 4.0 "
        "WHEN i = 7 THEN 9223372036854775794 ELSE i % 101 END AS value FROM range(400) t(i), range(16) u(g), "
        "(VALUES ('DCGM_FI_DEV_GPU_UTIL'), ('DCGM_FI_PROF_SM_ACTIVE'), ('something_else')) v(metric) "
        "WHERE NOT (i BETWEEN 100 AND 110 AND g = 3)",
    )
    store = convert(path, tmp_path / "store")
    for where in (path, store.folder):
        with scratch_trace() as trace:
            attach(trace, where, cluster="mine")
            assert trace.metrics == {"GPU_UTIL", "SM_ACTIVE"}
            values = trace.aggregate("metric_values")
            ratios = values.where(metric="SM_ACTIVE")
            assert sorted(ratios["value"].tolist()) == [0, 25, 50, 75, 100]
            assert ratios["n"].sum() == 400 * 16 - 11
            assert values.where(metric="GPU_UTIL")["n"].sum() == 399 * 16 - 11
            devices = trace.aggregate("metric_devices").where(metric="GPU_UTIL")
            assert set(devices["device"].tolist()) == {f"node{g // 8}-{g % 8}" for g in range(16)}
            checks = {(note.check, note.rows, note.action, note.cluster) for note in trace.notes}
            assert ("telemetry-sentinel", 16, "dropped", "mine") in checks
            assert ("telemetry-gap", 1, "kept", "mine") in checks
            assert (
                trace.query("SELECT count(*) AS n FROM samples")["n"][0]
                == 399 * 16 - 11 + 400 * 16 - 11
            )


def test_a_long_file_without_a_sample_is_said_to_hold_none(tmp_path):
    path = write_long(
        tmp_path / "GPU_TEMP.parquet",
        "SELECT now() AS time, 'n' AS device, 1.5 AS value WHERE false",
    )
    with scratch_trace() as trace:
        attach(trace, path, cluster="mine", metric="GPU_TEMP")
        assert [(note.check, note.rows, note.cluster) for note in trace.notes] == [
            ("telemetry-empty", 0, "mine")
        ]


def test_repeated_samples_of_a_long_file_count_once(tmp_path):
    path = write_long(
        tmp_path / "GPU_TEMP.parquet",
        "SELECT epoch('2023-07-01 00:00:00'::TIMESTAMP)::BIGINT + 15 * (i % 90) AS timestamp, 'n-' || g AS device, "
        "40 + i % 90 AS value FROM range(100) t(i), range(3) u(g)",
    )
    with scratch_trace() as trace:
        attach(trace, path, cluster="mine", metric="GPU_TEMP")
        assert trace.aggregate("metric_values")["n"].sum() == 270
        assert [(note.check, note.rows) for note in trace.notes] == [
            ("telemetry-duplicate-time", 30)
        ]
        assert trace.query("SELECT min(samples.at) AS low FROM samples")["low"][0] == np.datetime64(
            "2023-07-01"
        )


def test_the_name_of_a_long_file_may_tell_its_metric(tmp_path):
    select = "SELECT '2023-07-01'::TIMESTAMP AS time, 'n' AS device, 50.0 AS value"
    assert value_counts(write_long(tmp_path / "GPU_TEMP.parquet", select)).values.tolist() == [50]
    with pytest.raises(BadUse, match="Name it after the metric"):
        value_counts(write_long(tmp_path / "mine.parquet", select))


def test_columns_of_other_names_are_mapped(tmp_path):
    path = write_long(
        tmp_path / "mine.parquet",
        "SELECT '2023-07-01 08:00:00+08:00'::TIMESTAMPTZ AS wann, 'n1' AS wo, 17.0 AS watt UNION ALL "
        "SELECT '2023-07-01 08:00:15+08:00', 'n1', 18.0",
    )
    with pytest.raises(BadTrace, match="no column looks like the at of a sample"):
        value_counts(path, "POWER_USAGE")
    with scratch_trace() as trace:
        mapped = {"at": "wann", "device": "wo", "value": "watt"}
        attach(trace, path, cluster="mine", metric="POWER_USAGE", columns=mapped)
        assert trace.aggregate("metric_hours")["hour"].tolist()[0] == datetime(2023, 7, 1)  # noqa: DTZ001
        with pytest.raises(BadUse, match="no column 'wer'"):
            attach(trace, path, cluster="mine", metric="POWER_USAGE", columns={"at": "wer"})


def test_ipmi_files_of_both_forms(tmp_path):
    (tmp_path / "ipmi").mkdir()
    (tmp_path / "ipmi" / "GPU_AB_Power.csv").write_text(
        "Time,Sys_Total_Power,CPU_Power,MEM_Power,node\n"
        "2023-07-01 08:00:00+08:00,3000,300,90,a-10-140-0-131\n"
        "2023-07-01 08:00:00+08:00,0,300,,a-10-140-0-132\n"
        "2023-07-01 08:05:00+08:00,3100.0,300,90,a-10-140-0-131\n"
    )
    (tmp_path / "ipmi" / "GPU_C_Power.csv").write_text(
        "Time,Sys_Total_Power\n2023-07-01 08:00:00+08:00,5000\n"
    )
    (tmp_path / "ipmi" / "CPU_D_Power.csv").write_text(
        "Time,c1,c2\n2023-07-01 08:00:00+08:00,700,710\n"
    )
    store = convert(tmp_path / "ipmi", tmp_path / "store")
    for where in (tmp_path / "ipmi", store.folder):
        with scratch_trace() as trace:
            attach(trace, where, cluster="seren")
            table = trace.aggregate("metric_devices")
            found = {
                (metric, device): (n, total) for _, metric, device, n, total, *_ in table.rows()
            }
            assert found == {
                ("GPU_SERVER_POWER", "a-10-140-0-131"): (2, 6100),
                ("GPU_SERVER_POWER", "GPU_C_Power"): (1, 5000),
                ("CPU_SERVER_POWER", "c1"): (1, 700),
                ("CPU_SERVER_POWER", "c2"): (1, 710),
            }
            assert [(note.check, note.rows) for note in trace.notes] == [
                ("telemetry-out-of-range", 1)
            ]


def test_a_bad_line_of_an_ipmi_file_is_found(tmp_path):
    path = tmp_path / "GPU_AB_Power.csv"
    path.write_text(
        "Time,Sys_Total_Power\n2023-07-01 08:00:00+08:00,3000\n2023-07-01 08:05:00+08:00,off\n"
    )
    with pytest.raises(BadTrace, match="'off' no number") as caught:
        value_counts(path)
    assert caught.value.line == 3
