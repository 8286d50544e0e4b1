import re
import sqlite3
import subprocess
import sys
from dataclasses import replace

import pytest
from ledger_records import ATTEMPT, CHECKPOINT, EVENT, INCIDENT, RUN, check_that_records_come_back

from holdfast.core.errors import LedgerError, NotFound
from holdfast.core.ledger import Ledger, engine
from holdfast.core.paths import ledger_url


@pytest.fixture
def url(tmp_path):
    return ledger_url(tmp_path)


@pytest.fixture
def ledger(url):
    with Ledger.open(url) as ledger:
        yield ledger


def test_records_come_back_as_they_went_in(url, ledger):
    check_that_records_come_back(url, ledger)


def test_changes_reach_one_row(ledger):
    for run_id in ("a", "b"):
        ledger.add_run(replace(RUN, run_id=run_id))
        ledger.add_attempt(replace(ATTEMPT, run_id=run_id))
    key = ledger.add_incident(INCIDENT)
    ledger.set_run("a", state="completed", ended_at_s=9.0)
    ledger.set_attempt("a", 1, last_step=7)
    ledger.set_incident(key, action="restart")
    assert [run.state for run in ledger.runs()] == ["completed", "running"]
    assert [ledger.attempts(run_id)[0].last_step for run_id in ("a", "b")] == [7, None]
    assert ledger.incident(key).action == "restart"


def test_what_does_not_exist_is_said_so(ledger):
    ledger.add_run(RUN)
    with pytest.raises(NotFound, match="no run 'z'"):
        ledger.run("z")
    with pytest.raises(NotFound, match="no run 'z'"):
        ledger.set_run("z", state="failed")
    with pytest.raises(NotFound, match="has no attempt 4"):
        ledger.set_attempt("a", 4, last_step=1)
    with pytest.raises(NotFound, match="no incident 4"):
        ledger.incident(4)
    with pytest.raises(NotFound, match="no incident 4"):
        ledger.set_incident(4, action="stop")


def test_a_checkpoint_saved_again_replaces_its_record(ledger):
    ledger.add_run(RUN)
    ledger.add_checkpoint(CHECKPOINT)
    ledger.add_checkpoint(replace(CHECKPOINT, step=6, path="q"))
    ledger.add_checkpoint(replace(CHECKPOINT, stall_s=0.75))
    assert [(one.step, one.stall_s) for one in ledger.checkpoints("a")] == [(6, 0.5), (5, 0.75)]


def test_removing_a_run_removes_all_that_is_its_and_nothing_else(ledger):
    for run_id in ("a", "b"):
        ledger.add_run(replace(RUN, run_id=run_id))
        ledger.add_attempt(replace(ATTEMPT, run_id=run_id))
        ledger.add_event(replace(EVENT, run_id=run_id))
        ledger.add_checkpoint(replace(CHECKPOINT, run_id=run_id))
        ledger.add_incident(replace(INCIDENT, run_id=run_id))
    ledger.remove_run("a")
    assert [run.run_id for run in ledger.runs()] == ["b"]
    for kind in (ledger.attempts, ledger.events, ledger.checkpoints, ledger.incidents):
        assert kind("a") == []
        assert len(kind("b")) == 1


WRITER = """
import sys
from holdfast.core.ledger import Event, Ledger
url, name = sys.argv[1:]
with Ledger.open(url) as ledger:
    for number in range(60):
        ledger.add_event(Event(run_id="a", attempt=1, at_s=number, kind=name))
"""


def test_processes_write_at_once_and_lose_nothing(url, ledger):
    ledger.add_run(RUN)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, url, name]) for name in "xyz"]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0, 0]
    for name in "xyz":
        assert [event.at_s for event in ledger.events("a", name)] == list(range(60))


OPENER = "import sys; from holdfast.core.ledger import Ledger; Ledger.open(sys.argv[1]).close()"


def test_processes_may_create_the_ledger_at_once(url):
    openers = [subprocess.Popen([sys.executable, "-c", OPENER, url]) for _ in range(4)]
    assert [opener.wait(timeout=120) for opener in openers] == [0, 0, 0, 0]


def test_a_ledger_locked_for_too_long_is_said_so(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "BUSY_TIMEOUT_S", 0.01)
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        holder = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(
            LedgerError, match=r"cannot be written: database is locked\. Check that"
        ):
            ledger.add_run(RUN)
        assert ledger.runs() == []  # readers do not wait for writers
        holder.execute("ROLLBACK")
        holder.close()
        ledger.add_run(RUN)
        assert ledger.runs() == [RUN]


def test_a_file_that_is_no_database_is_said_so(tmp_path):
    (tmp_path / "ledger.db").write_bytes(b"these are not the bytes of a database" * 40)
    with pytest.raises(
        LedgerError, match=r"cannot be opened: file is not a database\. Name another"
    ):
        Ledger.open(ledger_url(tmp_path))


def test_a_folder_that_cannot_be_made_is_said_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match=r"cannot be opened: .*Not a directory.*HOLDFAST_HOME"):
        Ledger.open(ledger_url(tmp_path / "file" / "home"))


@pytest.mark.parametrize(
    "url", ["nonsense", "nosuch://h/d", "postgresql+nosuchdriver://u:secret@h/d"]
)
def test_a_wrong_url_is_said_so(url):
    with pytest.raises(LedgerError, match=re.escape("Name another with --ledger URL")):
        Ledger.open(url)


def test_a_password_is_not_printed():
    with pytest.raises(LedgerError) as raised:
        Ledger.open("postgresql+nosuchdriver://user:secret@host/base")
    assert "secret" not in str(raised.value)
