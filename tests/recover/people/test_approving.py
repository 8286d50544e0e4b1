"""`holdfast runs approve` prints the result of the proposal."""

import socket
import threading
import time

import pytest

from holdfast.core.errors import BadUse
from holdfast.core.ledger import Attempt, Event, Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.recover.run_lock import RunLock
from holdfast.recover.runs import approve_run

PATIENCE_S = 120.0


@pytest.fixture
def run(tmp_path):
    """A run that goes on, with a proposal: its ledger and paths."""
    paths = RunPaths(tmp_path, "r")
    paths.logs.mkdir(parents=True)
    lock = RunLock.acquire(paths.lock)
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        ledger.add_run(
            Run(
                run_id="r",
                state="running",
                command=["python"],
                options={},
                cwd="/",
                host=socket.gethostname(),
                pid=1,
                started_at_s=1.0,
            )
        )
        ledger.add_attempt(Attempt(run_id="r", number=1, started_at_s=1.0))
        add(ledger, "proposal", {"number": 7, "text": "Rank 1 is frozen."})
        yield ledger, paths
    lock.release()


def add(ledger, kind, data, attempt=1):
    ledger.add_event(Event(run_id="r", attempt=attempt, at_s=2.0, kind=kind, data=data))


def approve(run, *events):
    """Approve the proposal, upon which a supervisor records these events."""
    ledger, paths = run

    def supervise():
        deadline_s = time.monotonic() + PATIENCE_S
        while not paths.approved.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        for event in events:
            add(ledger, *event)

    supervisor = threading.Thread(target=supervise)
    supervisor.start()
    try:
        return approve_run("r", ledger, paths.home, timeout_s=PATIENCE_S)
    finally:
        supervisor.join()


def test_an_approved_proposal_is_returned(run):
    assert approve(run, ("approved", {"number": 7})) == "Rank 1 is frozen."
    assert run[1].approved.read_text() == "7\n"


def test_a_proposal_that_is_carried_out_counts_whatever_came_after_it(run):
    later = ("proposal", {"number": 8, "text": "Again."}, 2)
    assert approve(run, ("approved", {"number": 7}), later) == "Rank 1 is frozen."


@pytest.mark.parametrize(
    "events",
    [
        [("withdrawn", {"why": "the job makes steps again."})],
        [
            ("withdrawn", {"why": "the job makes steps again."}),
            ("proposal", {"number": 8, "text": "Rank 2 is frozen."}),
        ],
    ],
)
def test_a_withdrawn_proposal_is_not_called_approved(run, events):
    with pytest.raises(BadUse, match=r"withdrawn: the job makes steps again\. "):
        approve(run, *events)


def test_a_proposal_about_an_attempt_that_is_over_is_not_called_approved(run):
    with pytest.raises(BadUse, match="its attempt has ended"):
        approve(run, ("proposal", {"number": 8, "text": "Rank 2 is frozen."}, 2))
