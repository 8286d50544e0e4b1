import json
import os
import signal
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import BadUse
from holdfast.trace import aggregates
from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import BadTrace, LeftOut
from holdfast.trace.loading import load
from holdfast.trace.notes import Note
from holdfast.trace.sources.reading import Reading
from holdfast.trace.sources.rows import read_rows
from holdfast.trace.sources.stored import is_store
from holdfast.trace.store import convert, merge_partials, write_partials
from holdfast.trace.trace import Trace, open_scratch

NOW_S = datetime(2024, 1, 1, tzinfo=UTC).timestamp()
COLUMNS = {
    "cluster": "VARCHAR", "job_id": "VARCHAR", "username": "VARCHAR", "type": "VARCHAR", "state": "VARCHAR",
    "submit_at": "TIMESTAMP", "start_at": "TIMESTAMP", "end_at": "TIMESTAMP", "run_s": "DOUBLE", "queue_s": "DOUBLE",
    "gpu_num": "DOUBLE", "nodes": "VARCHAR[]",
}  # fmt: skip
NOTE = Note(cluster="A", check="odd", sentence="Odd.", rows=1, action="kept", examples=("1", "2"))


def trace_of(rows, *, notes=(), compared=(), duration="run", clusters=("A", "B")):
    connection, folder = open_scratch(memory_limit_mb=200)
    read_rows(connection, "jobs_0", COLUMNS, rows)
    reading = Reading(
        table="jobs_0",
        columns=frozenset(COLUMNS),
        clusters=tuple(
            Cluster(name=name, source="made-up", gpu_num=16, utc_offset_h=8) for name in clusters
        ),
        notes=notes,
        lacking={"B": frozenset({"nodes", "username"})},
    )
    return Trace(connection, folder, [reading], duration=duration, compared=frozenset(compared))


def row(number, cluster="A", gpus=8.0, submit=0, queue=10, run=100, state="COMPLETED"):
    submit_at = np.datetime64("2023-03-01T00:00:00", "us") + np.timedelta64(submit, "s")
    times = [
        (submit_at + np.timedelta64(seconds, "s")).item() for seconds in (0, queue, queue + run)
    ]
    nodes = ["n1", "it's n2"] if number % 2 else None
    return (cluster, str(number), f"u{number % 3}", "SFT", state, *times, run, queue, gpus, nodes)


ROWS = [row(1), row(2, "B", gpus=0.5), row(3, state="FAILED"), row(4, submit=86_400 * 40)]


def jobs(trace):
    return trace.connection.execute("SELECT * FROM jobs ORDER BY ALL").fetchall()


def test_a_store_holds_the_trace_as_it_is(tmp_path):
    folder = tmp_path / "new" / "it's [one]"
    with trace_of(ROWS, notes=(NOTE,), compared=("B",)) as trace:
        convert(trace, folder)
        before, columns, clusters = jobs(trace), trace.columns, trace.clusters
    assert sorted(path.name for path in folder.iterdir()) == ["jobs.parquet", "manifest.json"]
    with load(folder, now_s=NOW_S) as again:
        assert jobs(again) == before
        assert again.columns == columns
        assert again.clusters == clusters
        assert again.notes == [NOTE]
        assert not again.has("username", cluster="B")
    with duckdb.connect() as connection:
        parquet = f"parquet_metadata('{folder / 'jobs.parquet'}')".replace("it's", "it''s").replace(
            "[", "[[]"
        )
        assert connection.execute(f"SELECT DISTINCT compression FROM {parquet}").fetchall() == [
            ("ZSTD",)
        ]


def test_the_manifest_says_what_is_there(tmp_path):
    with trace_of(ROWS, notes=(NOTE,), duration="released") as trace:
        convert(trace, tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["schema"], manifest["version"], manifest["duration"]) == (
        "holdfast.trace.store",
        1,
        "released",
    )
    rows = {
        cluster["name"]: (cluster["rows"], cluster["compared"]) for cluster in manifest["clusters"]
    }
    assert rows == {"A": (3, False), "B": (1, False)}
    assert set(manifest["clusters"][1]["columns"]) == set(COLUMNS) - {"nodes", "username"}
    assert manifest["notes"][0]["check"] == "odd"


def test_a_store_is_never_written_over_nor_other_things(tmp_path):
    with trace_of(ROWS) as trace:
        convert(trace, tmp_path / "store")
        kept = (tmp_path / "store" / "jobs.parquet").read_bytes()
        with pytest.raises(BadUse, match="holds a store already"):
            convert(trace, tmp_path / "store")
        assert (tmp_path / "store" / "jobs.parquet").read_bytes() == kept
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "thesis.tex").touch()
        with pytest.raises(BadUse, match=r"other things, such as thesis\.tex"):
            convert(trace, tmp_path / "full")
        with pytest.raises(BadUse, match="is a file"):
            convert(trace, tmp_path / "full" / "thesis.tex")
        (tmp_path / "telemetry").mkdir()
        (tmp_path / "telemetry" / "devices.parquet").touch()
        convert(trace, tmp_path / "telemetry")
        assert is_store(tmp_path / "telemetry")


def test_progress_is_told(tmp_path):
    told = []
    with trace_of(ROWS) as trace:
        convert(trace, tmp_path / "store", progress=lambda *what: told.append(what))
    assert told == [("Writing jobs", 0.0, 4.0), ("Writing jobs", 4.0, 4.0)]


KILLED = """
import os, signal, sys
from pathlib import Path
from holdfast.trace import store
from holdfast.trace.loading import load

place = sys.argv[3]
if place == "writing":
    import threading, time
    from holdfast.core import atomic
    folder = Path(sys.argv[2])
    atomic.os.fsync = lambda _: time.sleep(60)  # a late kill is before the rename, too
    def kill():
        while not list(folder.glob(".jobs.parquet.*.tmp")):
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=kill, daemon=True).start()
else:
    def killing(*_):
        os.kill(os.getpid(), signal.SIGKILL)
    from holdfast.core import atomic
    where, name = {"written": (atomic, "fsync_folder"), "renamed": (store, "write_manifest")}[place]
    setattr(where, name, killing)
store.convert(load(sys.argv[1]), Path(sys.argv[2]))
"""
HEADER = "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time\n"


@pytest.mark.parametrize("place", ["writing", "written", "renamed"])
def test_a_kill_while_converting_leaves_no_half_store(tmp_path, place, monkeypatch):
    jobs_csv, folder = tmp_path / "jobs.csv", tmp_path / "store"
    n = 200_000 if place == "writing" else 10
    with jobs_csv.open("w") as file:
        file.write(HEADER)
        for number in range(n):
            file.write(
                f"{number},u{number % 99},1,8,16,SFT,COMPLETED,2023-03-01 08:00:00+08:00,2023-03-01 08:00:10+08:00,"
                f"2023-03-01 08:01:50+08:00,100,10,{number}\n"
            )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    died = subprocess.run(
        [sys.executable, "-c", KILLED, jobs_csv, folder, place],
        env={**os.environ, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not is_store(folder)
    assert not (folder / "manifest.json").exists()
    with pytest.raises(BadTrace):
        load(folder)
    with load(jobs_csv, now_s=NOW_S) as trace:
        convert(trace, folder)
    with load(folder, now_s=NOW_S) as again:
        assert again.query("SELECT count(*) AS n FROM jobs")["n"][0] == n
    assert sorted(path.name for path in folder.iterdir()) == ["jobs.parquet", "manifest.json"]


def test_a_damaged_store_is_an_error_that_says_so(tmp_path):
    with trace_of(ROWS) as trace:
        convert(trace, tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())

    def change(**entries):
        (tmp_path / "manifest.json").write_text(json.dumps({**manifest, **entries}))

    change(version=99)
    with pytest.raises(
        BadTrace, match=r"Found holdfast.trace.store 99; expected holdfast.trace.store 1"
    ):
        load(tmp_path)
    change(clusters=[{"name": "A"}])
    with pytest.raises(BadTrace, match="not a manifest of a store"):
        load(tmp_path)
    change(clusters=[{**manifest["clusters"][0], "rows": 7}])
    with pytest.raises(BadTrace, match="4 rows, its manifest has 7"):
        load(tmp_path)
    change()
    (tmp_path / "jobs.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadTrace, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    assert not is_store(tmp_path)


MERGEABLE = tuple(
    name
    for name in aggregates.names()
    # Skip aggregates of telemetry, and of pairs of jobs that a cut may separate.
    if name != "failure_restarts" and not name.startswith(("metric_", "joined_", "xid_"))
)


@st.composite
def cut_jobs(draw):
    numbers = range(draw(st.integers(1, 30)))
    rows = [
        row(
            number,
            cluster=draw(st.sampled_from("AB")),
            gpus=draw(st.sampled_from([0.0, 0.25, 1.0, 8.0, 64.0])),
            submit=draw(st.integers(0, 86_400 * 100)),
            queue=draw(st.integers(0, 10_000)),
            run=draw(st.integers(0, 100_000)),
            state=draw(st.sampled_from(["COMPLETED", "FAILED", "CANCELLED", "RUNNING"])),
        )
        for number in numbers
    ]
    part = [draw(st.integers(0, 2)) for _ in numbers]
    return rows, [
        [one for one, number in zip(rows, part, strict=True) if number == n] for n in range(3)
    ]


def in_order(trace, name):
    """Sort an aggregate's columns and rows; all sums here are exact in floats."""
    table = trace.aggregate(name)
    rows = [
        [repr(cell + 0.0 if isinstance(cell, float) else cell) for cell in one]
        for one in table.rows()
    ]
    return {column: values.dtype for column, values in table.columns.items()}, sorted(rows)


@settings(max_examples=4, deadline=None)
@given(cut_jobs())
def test_any_cut_of_the_jobs_merges_to_the_aggregates_of_the_whole(cut):
    rows, parts = cut
    with tempfile.TemporaryDirectory() as folder, trace_of(rows) as whole:
        folders = [Path(folder) / str(number) for number in range(len(parts))]
        for part, place in zip(parts, folders, strict=True):
            with trace_of(part) as trace:
                write_partials(trace, place, MERGEABLE)
        with merge_partials(folders) as merged:
            for name in MERGEABLE:
                assert in_order(merged, name) == in_order(whole, name), name
            assert merged.columns == whole.columns
            assert merged.clusters == whole.clusters


def test_a_merged_trace_says_what_it_lacks(tmp_path):
    for number, duration in enumerate(["run", "run", "released"]):
        with trace_of(
            ROWS[number : number + 1], duration=duration, notes=(NOTE,), compared=("B",)
        ) as trace:
            write_partials(trace, tmp_path / str(number), ["job_durations"][: number + 1])
    with merge_partials([tmp_path / "0", tmp_path / "1"]) as merged:
        assert len(merged.aggregate("job_durations")) == 2
        assert merged.notes == [NOTE, NOTE]
        assert merged.compared == {"B"}
        assert merged.has("nodes")
        with pytest.raises(LeftOut, match="hold no job_counts"):
            merged.aggregate("job_counts")
    with pytest.raises(BadUse, match="released durations"):
        merge_partials([tmp_path / "0", tmp_path / "2"])
    with pytest.raises(BadUse, match="no partial results"):
        merge_partials([])
    with pytest.raises(BadTrace, match="not a manifest of a partial"):
        merge_partials([tmp_path / "nowhere"])


def test_partials_need_what_their_aggregates_need(tmp_path):
    with trace_of(ROWS) as trace, pytest.raises(LeftOut):
        write_partials(trace, tmp_path, ["metric_hours"])
    assert not (tmp_path / "manifest.json").exists()
