"""Which supervisor leads, by files that all nodes share, and by a row of a real PostgreSQL."""

import os
import threading

import pytest

from holdfast.core.errors import LedgerError
from holdfast.core.ledger import Ledger, Run
from holdfast.core.paths import RunPaths
from holdfast.recover import leadership
from holdfast.recover.agent.board import LedgerBoard, board_of
from holdfast.recover.leadership import (
    SharedFolder,
    SharedLedger,
    Superseded,
    Watch,
    leadership_of,
)
from holdfast.testing.postgresql import PrivatePostgreSQL, postgresql_binaries

NEEDS_POSTGRESQL = pytest.mark.skipif(
    postgresql_binaries() is None, reason="no PostgreSQL server is installed"
)


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path, "r")


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("psycopg")
    with PrivatePostgreSQL() as server:
        yield server


@pytest.fixture
def url(server):
    url = server.new_database()
    run = {"run_id": "r", "state": "running", "command": ["c"], "options": {}, "cwd": "/"}
    with Ledger.open(url) as ledger:
        ledger.add_run(Run(**run, host="h", pid=1, started_at_s=0.0))
    return url


@pytest.fixture(params=["folder", pytest.param("postgresql", marks=NEEDS_POSTGRESQL)])
def lead(request, paths):
    """Return the lead of a run, from both authorities."""
    if request.param == "folder":
        yield leadership_of("sqlite:///x.db", paths, Ledger)
        return
    with Ledger.open(request.getfixturevalue("url")) as ledger:
        yield leadership_of(ledger.url, paths, lambda: ledger)


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("holdfast.recover.leadership.time.monotonic", lambda: now[0])
    return now


def test_numbers_rise_and_the_highest_leads(lead):
    assert [lead.take("n1", None) for _ in range(3)] == [1, 2, 3]
    assert lead.beat(3)
    assert not lead.beat(2)


def test_a_supervisor_that_beats_is_not_gone(lead, clock):
    lead.take("n1", None)
    lead.beat(1)
    watch = Watch(lead)
    for at_s in range(20):
        lead.beat(1)
        if isinstance(lead, SharedFolder):
            os.utime(lead._beat_file, (at_s, at_s))
        assert watch.gone() is None
        clock[0] += 5.0
    clock[0] += leadership.SILENT_S + 1
    assert watch.gone() is not None


def test_a_node_from_which_another_has_taken_over_does_not_lead_again(lead):
    assert lead.take("n1", None) == 1
    assert lead.take("n1", 1) == 2
    assert lead.take("n1", 1) == 3, "its own that ended early"
    assert lead.take("n2", 3) == 4
    with pytest.raises(Superseded):
        lead.take("n1", 3)
    assert lead.take("n3", None) == 5, "a person has started it"


def test_of_nodes_that_claim_at_once_exactly_one_leads(lead):
    lead.take("n1", None)
    lead.beat(1)
    sign, barrier, claims = lead.sign(), threading.Barrier(4), {}

    def claim(name):
        barrier.wait(60)
        claims[name] = lead.claim(sign, name)

    threads = [threading.Thread(target=claim, args=(f"n{number}",)) for number in range(2, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (leader,) = [name for name, after in claims.items() if after is not None]
    assert lead.take(leader, claims[leader]) == lead.sign()[0]
    assert not lead.beat(1), "the old leader ends when it comes back"


def test_storage_that_fails_ends_no_supervisor(paths):
    paths.root.mkdir(parents=True)
    paths.supervisors.write_text("no folder")
    assert SharedFolder(paths).beat(1)


def test_without_the_folder_nobody_is_gone(paths, clock):
    watch = Watch(SharedFolder(paths))
    clock[0] += 1000.0
    assert watch.gone() is None


def test_one_node_takes_over_in_a_folder_and_another_if_that_one_does_not(paths):
    lead = SharedFolder(paths)
    lead.take("n1", None)
    assert lead.claim((1, 0), "n2") == 1
    assert lead.claim((1, 0), "n3") is None
    (first,) = paths.supervisors.glob("*.follower-0")
    os.utime(first, (0, 0))
    assert lead.claim((1, 0), "n3") == 1
    assert lead.claim((1, 0), "n2") is None
    assert lead.take("n3", 1) == 2, "who has said so leads once its supervisor has started"


@NEEDS_POSTGRESQL
def test_a_leader_that_beats_once_more_keeps_the_lead(url):
    with Ledger.open(url) as ledger:
        lead = SharedLedger(lambda: ledger, "r")
        lead.take("n1", None)
        sign = lead.sign()
        assert lead.beat(1)
        assert lead.claim(sign, "n2") is None
        assert lead.claim(lead.sign(), "n2") == 2
        # That node dies before its supervisor starts: another one passes it over.
        assert lead.claim(lead.sign(), "n3") == 3
        with pytest.raises(Superseded):
            lead.take("n2", 2)


@NEEDS_POSTGRESQL
def test_a_database_that_is_away_changes_nothing(server, url, clock):
    with Ledger.open(url) as ledger:
        lead = SharedLedger(lambda: ledger, "r")
        lead.take("n1", None)
        board = board_of(None, "k", url)
        assert isinstance(board, LedgerBoard)
        assert board.read() is None
        told = {"hosts": ["h"], "port": 1, "token": "t", "run_id": "r"}
        board.publish(told)
        assert board.read() == told
        watch = Watch(lead)
        assert watch.gone() is None
        server.stop()
        try:
            for _ in range(6):
                clock[0] += 10.0
                assert lead.beat(1), "the leader goes on"
                assert watch.gone() is None, "nobody claims"
            assert board.read() is None
            with pytest.raises(LedgerError):
                lead.take("n1", 1)
        finally:
            server.start()
        assert watch.gone() is None, "the leader has had no chance to beat yet"
        clock[0] += 5.0
        assert lead.beat(1)
        clock[0] += leadership.SILENT_S - 1
        assert watch.gone() is None
        assert board.read() == told
        board.remove()
        assert board.read() is None
        board._opened().close()
