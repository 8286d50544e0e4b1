import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from normalised_rows import database, read_file, rows_of, unix_s

from holdfast.core.errors import LedgerError
from holdfast.core.ledger import Attempt, Event, Incident, Ledger, Run
from holdfast.core.paths import ledger_url
from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.ledger import SOURCE, read_url

RUN = Run(
    run_id="good-run", state="completed", command=["python", "train.py", "--name", "a b"], options={"nproc": 8},
    cwd="/x", host="node-1", pid=1, started_at_s=100.0, ended_at_s=900.0, exit_code=0,
)  # fmt: skip


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        yield ledger


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "ledger.db"


def attempt(number, started_at_s, ended_at_s, outcome="failed", run_id="good-run"):
    return Attempt(
        run_id=run_id,
        number=number,
        started_at_s=started_at_s,
        ended_at_s=ended_at_s,
        outcome=outcome,
    )


def incident(number, rank, reason):
    return Incident(
        run_id="good-run", attempt=number, kind="exit", rank=rank, step=1, fault_at_s=1.0, detected_at_s=2.0,
        diagnosis={"reason": reason}, action="restart",
    )  # fmt: skip


def exited(number, rank, exit_code=None, signal=None):
    return Event(
        run_id="good-run", attempt=number, at_s=1.0, kind="rank_exited", rank=rank,
        data={"pid": 1, "exit_code": exit_code, "signal": signal},
    )  # fmt: skip


def times(row):
    return tuple(unix_s(row[name]) for name in ("submit_at", "start_at", "end_at"))


def test_each_attempt_of_a_run_is_one_of_a_job(ledger, path):
    ledger.add_run(RUN)
    ledger.add_attempt(attempt(1, 101.0, 300.0))
    ledger.add_attempt(attempt(2, 310.5, 500.0))
    ledger.add_attempt(attempt(3, 505.0, 900.0, "completed"))
    ledger.add_incident(incident(1, 3, "CUDAError"))
    ledger.add_incident(incident(2, None, "NodeFailure"))
    for event in (exited(1, 0, signal=6), exited(1, 3, exit_code=17), exited(2, 5, signal=9)):
        ledger.add_event(event)
    ledger.add_event(
        Event(run_id="good-run", attempt=2, at_s=1.0, kind="started", data={"world_size": 6})
    )
    assert SOURCE.recognises(path)
    reading, rows = read_file(SOURCE, path)
    assert [times(row) for row in rows] == [(100, 101, 300), (300, 310.5, 500), (500, 505, 900)]
    assert [
        (row["attempt"], row["state"], row["reason"], row["exit_code"], row["gpu_num"])
        for row in rows
    ] == [
        (0, "FAILED", "CUDAError", 17, 8),
        (1, "FAILED", "NodeFailure", 137, 6),
        (2, "COMPLETED", None, 0, 8),
    ]
    assert [row["queue_s"] for row in rows] == [1, 10.5, 5]
    assert [row["run_s"] for row in rows] == [199, 189.5, 395]
    assert {(row["job_id"], row["name"], row["cluster"], row["node_num"]) for row in rows} == {
        ("good-run", "python train.py --name 'a b'", "holdfast", 1)
    }
    assert rows[0]["nodes"] == ["node-1"]
    assert [cluster.name for cluster in reading.clusters] == ["holdfast"]


@pytest.mark.parametrize(
    ("run_state", "outcome", "state", "end_s"),
    [
        ("running", "running", "RUNNING", None),
        ("failed", "running", "FAILED", 900),  # its supervisor was killed
        ("stopped", "stopped", "CANCELLED", 800),
        ("failed", "failed", "FAILED", 800),
    ],
)
def test_how_the_last_attempt_ended(ledger, path, run_state, outcome, state, end_s):
    over = run_state != "running"
    ledger.add_run(
        replace(
            RUN, state=run_state, ended_at_s=900.0 if over else None, exit_code=4 if over else None
        )
    )
    ledger.add_attempt(attempt(1, 101.0, None if outcome == "running" else 800.0, outcome))
    _, (row,) = read_file(SOURCE, path)
    assert (row["state"], times(row), row["exit_code"]) == (
        state,
        (100, 101, end_s),
        4 if over else None,
    )


def test_torchrun_says_itself_how_many_ranks_it_starts(ledger, path):
    ledger.add_run(
        replace(RUN, command=["torchrun", "--nproc-per-node", "4", "t.py"], options={"nproc": 1})
    )
    ledger.add_attempt(attempt(1, 101.0, 300.0))
    _, (row,) = read_file(SOURCE, path)
    assert row["gpu_num"] is None
    ledger.add_event(
        Event(run_id="good-run", attempt=1, at_s=1.0, kind="started", data={"world_size": 4})
    )
    _, (row,) = read_file(SOURCE, path)
    assert row["gpu_num"] == 4


def test_a_clock_that_was_set_back_gives_no_negative_wait(ledger, path):
    ledger.add_run(RUN)
    ledger.add_attempt(attempt(1, 101.0, 300.0))
    ledger.add_attempt(attempt(2, 290.0, 500.0))
    _, rows = read_file(SOURCE, path)
    assert [row["queue_s"] for row in rows] == [1, 0]


def test_a_ledger_without_runs_is_told(ledger, path):
    with pytest.raises(BadTrace, match="holds no run"):
        read_file(SOURCE, path)


def test_reading_changes_nothing(ledger, path):
    ledger.add_run(RUN)
    ledger.add_attempt(attempt(1, 101.0, 300.0))
    ledger.close()
    before = path.read_bytes()
    read_file(SOURCE, path)
    assert path.read_bytes() == before
    assert len(ledger.runs()) == 1


def test_a_ledger_by_its_url(ledger, tmp_path):
    ledger.add_run(RUN)
    ledger.add_attempt(attempt(1, 101.0, 300.0))
    with database() as connection:
        reading = read_url(connection, ledger_url(tmp_path), "jobs_0")
        assert len(rows_of(connection, reading)) == 1


@pytest.mark.parametrize("url", ["sqlite:////nowhere/ledger.db", "no url"])
def test_a_url_of_nothing_is_the_users_error(url):
    with database() as connection, pytest.raises(BadTrace, match="ledger"):
        read_url(connection, url, "jobs_0")


def test_a_server_that_does_not_answer_is_the_users_error():
    with database() as connection, pytest.raises(LedgerError, match="cannot be opened"):
        read_url(connection, "postgresql://127.0.0.1:1/none", "jobs_0")


def test_another_sqlite_file_is_not_taken_for_a_ledger_and_not_made_one(tmp_path):
    path = tmp_path / "trace.sqlite"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE kernels (id INTEGER)")
    other.close()
    before = path.read_bytes()
    assert not SOURCE.recognises(path)
    with pytest.raises(BadTrace, match="has no incidents"):
        read_file(SOURCE, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"SQLite", b"job_id,state\n1,COMPLETED\n"])
def test_other_files_are_not_taken_for_a_ledger(tmp_path, content):
    path = tmp_path / "other.db"
    path.write_bytes(content)
    assert not SOURCE.recognises(path)
    assert not SOURCE.recognises(tmp_path)
    with pytest.raises(BadTrace, match="ledger"):
        read_file(SOURCE, path)
