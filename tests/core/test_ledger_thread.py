"""Test an event loop that goes on while its ledger does not answer."""

import os
import signal
import threading

import psutil
import pytest

from holdfast.core.errors import LedgerError, LedgerUnreachable
from holdfast.core.ledger import Event, Ledger, LedgerThread, Run
from holdfast.core.ledger import ledger_thread as module
from holdfast.core.paths import ledger_url
from holdfast.testing.postgresql import PrivatePostgreSQL, postgresql_binaries

RUN = Run(
    run_id="r",
    state="running",
    command=["c"],
    options={},
    cwd="/",
    host="h",
    pid=1,
    started_at_s=0.0,
)


def event(number):
    return Event(run_id="r", attempt=number, at_s=0.0, kind="k")


class Answering:
    """A ledger that holds back each operation until the test permits it."""

    def __init__(self):
        self.may, self.done, self.url = threading.Event(), [], "u"
        self.failures = 0

    def add_event(self, number):
        assert self.may.wait(60)
        if self.failures:
            self.failures -= 1
            raise LedgerUnreachable("The server is away.")
        if number < 0:
            raise LedgerError(f"not written: {number}")
        self.done.append(number)

    def repeating(self):
        return self

    def events(self):
        assert self.may.wait(60)
        return list(self.done)


@pytest.fixture
def answering():
    ledger = Answering()
    yield ledger
    ledger.may.set()


@pytest.fixture
def thread(answering):
    thread = LedgerThread(answering, wait_s=0.0)
    yield thread
    answering.may.set()
    thread.close()


def test_while_an_operation_is_stuck_nobody_waits_at_all(answering, monkeypatch):
    thread = LedgerThread(answering, wait_s=3600.0)
    thread.start()
    monkeypatch.setattr(LedgerThread, "is_stuck", True)
    with pytest.raises(LedgerError, match="does not answer"):
        thread.ledger.add_event(1)  # an hour later, if the call waited
    answering.may.set()
    thread.close()
    assert answering.done == [1]


def test_a_write_does_not_wait_and_a_read_comes_after_all_writes(answering, thread):
    thread.start()
    for number in range(3):
        thread.later(lambda ledger, number=number: ledger.add_event(number))
    with pytest.raises(LedgerError, match="does not answer"):
        thread.ledger.events()
    with pytest.raises(LedgerError, match="its records wait"):
        thread.ledger.add_event(3)
    assert answering.done == []
    answering.may.set()
    patient = LedgerThread(answering)
    patient._work, patient._thread = thread._work, thread._thread
    assert patient.ledger.events() == [0, 1, 2, 3], (
        "what was not waited for was written all the same"
    )
    assert thread.ledger.url == "u"


def test_before_the_thread_begins_each_operation_is_carried_out_at_once(answering, thread):
    answering.may.set()
    thread.later(lambda ledger: ledger.add_event(1))
    assert thread.ledger.events() == [1]
    with pytest.raises(LedgerError, match="not written"):
        thread.later(lambda ledger: ledger.add_event(-1))


def test_errors_for_which_nobody_has_waited_are_kept(answering, thread):
    thread.start()
    thread.later(lambda ledger: ledger.add_event(-1))
    thread.later(lambda ledger: ledger.no_such_operation())
    answering.may.set()
    thread.close()
    first, second = thread.take_errors()
    assert first == "not written: -1"
    assert second.startswith("A record was not written: AttributeError")
    thread.later(lambda ledger: ledger.add_event(2))
    assert (thread.take_errors(), answering.done) == ([], [2])


def test_while_the_server_is_away_the_records_wait_in_their_order(answering, thread, monkeypatch):
    monkeypatch.setattr(module, "REPEAT_S", 0.0)
    thread.start()
    answering.failures = 5
    for number in (1, -2, 3):
        thread.later(lambda ledger, number=number: ledger.add_event(number))
    answering.may.set()
    thread.close()
    assert answering.done == [1, 3]
    away, refused = thread.take_errors()
    assert away == "The server is away. The run goes on, and its records wait."
    assert refused == "not written: -2", "an answer of the ledger is no reason to try again"


def test_of_too_many_operations_the_last_are_dropped_and_that_is_reported(
    answering, thread, monkeypatch
):
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    thread.start()
    for number in range(6):
        thread.later(lambda ledger, number=number: ledger.add_event(number))
        while thread._began_s is None:  # the first operation waits for the ledger, not in the queue
            os.sched_yield()
    dropped = thread.take_errors()
    assert {"The ledger has not answered for long. Records of the run are lost."} == set(dropped)
    answering.may.set()
    thread.close()
    assert answering.done == list(range(6 - len(dropped)))


def test_the_end_waits_for_a_ledger_that_was_silent_and_reports_what_is_missing(answering):
    slow = LedgerThread(answering, wait_s=0.0, close_s=60.0)
    slow.start()
    slow.later(lambda ledger: ledger.add_event(1))
    while slow._began_s is None:
        os.sched_yield()
    assert slow.is_stuck
    threading.Timer(0.05, answering.may.set).start()
    slow.close()
    assert (answering.done, slow.take_errors()) == ([1], [])
    answering.may.clear()
    silent = LedgerThread(answering, wait_s=0.0, close_s=0.0)
    silent.start()
    for number in (2, 3):
        silent.later(lambda ledger, number=number: ledger.add_event(number))
    while silent._began_s is None:
        os.sched_yield()
    silent.close()
    (error,) = silent.take_errors()
    assert "the last records of the run are missing (2 operations)" in error


def test_without_a_further_thread_each_operation_is_carried_out_at_once(
    answering, thread, monkeypatch
):
    def refused(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    thread.start()
    answering.may.set()
    thread.later(lambda ledger: ledger.add_event(1))
    assert answering.done == [1]


def test_a_real_ledger_has_everything_in_order(tmp_path):
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        ledger.add_run(RUN)
        thread = LedgerThread(ledger)
        thread.start()
        for number in range(20):
            thread.later(lambda ledger, number=number: ledger.add_event(event(number)))
        assert [one.attempt for one in thread.ledger.events("r")] == list(range(20))
        thread.close()


@pytest.mark.skipif(postgresql_binaries() is None, reason="no PostgreSQL server is installed")
def test_a_frozen_server_holds_up_no_caller_and_has_all_records_afterwards():
    """Without the thread, the calls below would wait for the server for ever."""
    pytest.importorskip("psycopg")
    with PrivatePostgreSQL() as server, Ledger.open(server.new_database()) as ledger:
        ledger.add_run(RUN)
        pid = int((server.folder / "data" / "postmaster.pid").read_text().split()[0])
        processes = [psutil.Process(pid), *psutil.Process(pid).children()]
        thread = LedgerThread(ledger, wait_s=0.1)
        thread.start()
        for one in processes:
            os.kill(one.pid, signal.SIGSTOP)
        try:
            for number in range(100):
                thread.later(lambda ledger, number=number: ledger.add_event(event(number)))
            with pytest.raises(LedgerError, match="does not answer"):
                thread.ledger.events("r")
        finally:
            for one in processes:
                os.kill(one.pid, signal.SIGCONT)
        worker = thread._thread
        thread.close()
        worker.join(60)
        assert [one.attempt for one in ledger.events("r")] == list(range(100))
        assert thread.take_errors() == []
