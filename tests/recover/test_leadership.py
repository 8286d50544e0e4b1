"""The election of the leading supervisor, by shared files and by a row of a real PostgreSQL."""

import errno
import os
import threading
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from holdfast.core.errors import LedgerError
from holdfast.core.ledger import Ledger, Run
from holdfast.core.paths import RunPaths
from holdfast.recover import leadership
from holdfast.recover.agent.board import LedgerBoard, board_of
from holdfast.recover.leadership import (
    LeaderWatch,
    SharedFolder,
    Superseded,
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
        yield leadership_of("sqlite:///x.db", paths)
        return
    with Ledger.open(request.getfixturevalue("url")) as ledger:
        yield leadership_of(ledger.url, paths, ledger)


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
    watch = LeaderWatch(lead)
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


@pytest.fixture
def full(monkeypatch):
    """Return an event: while it is set, no file can be created."""
    is_full, opened = threading.Event(), Path.open

    def open_file(path, mode="r", *args, **kwargs):
        if mode == "x" and is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_file)
    return is_full


def test_on_a_full_disk_each_supervisor_of_a_node_has_a_new_number(paths, full):
    assert SharedFolder(paths).take("n1", None) == 1
    full.set()
    lead = SharedFolder(paths)
    assert lead.take("n1", 1) == 2
    assert lead.beat(2), "training does not end by that"
    lead = SharedFolder(paths)
    assert lead.take("n1", 2) == 3, "agents would take the same number for the same supervisor"
    full.clear()
    assert lead.beat(3)
    assert lead.sign()[0] == 3


def test_a_number_that_could_not_be_recorded_is_lost_to_the_node_that_records_it(paths, full):
    first = SharedFolder(paths)
    first.take("n1", None)
    full.set()
    assert first.take("n1", 1) == 2
    full.clear()
    second = SharedFolder(paths)
    assert second.take("n2", second.claim((1, 0), "n2")) == 2
    assert second.beat(2)
    assert not first.beat(2)


def test_without_the_folder_nobody_is_gone(paths, clock):
    watch = LeaderWatch(SharedFolder(paths))
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
def test_a_leader_that_beats_once_more_keeps_the_lead(url, paths):
    with Ledger.open(url) as ledger:
        lead = leadership_of(url, paths, ledger)
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
def test_a_database_that_is_away_changes_nothing(server, url, paths, clock):
    with Ledger.open(url) as ledger:
        lead = leadership_of(url, paths, ledger)
        lead.take("n1", None)
        board = board_of(None, "k", url)
        assert isinstance(board, LedgerBoard)
        assert board.read() is None
        told = {"hosts": ["h"], "port": 1, "token": "t", "run_id": "r"}
        board.publish(told)
        assert board.read() == told
        watch = LeaderWatch(lead)
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


@NEEDS_POSTGRESQL
def test_nodes_that_watch_keep_no_connection_of_the_server(url, paths, place):
    watches = [LeaderWatch(leadership_of(url, paths)) for _ in range(3)]
    boards = [board_of(None, "k", url) for _ in range(3)]
    assert [watch.gone() for watch in watches] == [None] * 3
    assert [board.read() for board in boards] == [None] * 3
    counted = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
    engine = create_engine(url)
    with engine.connect() as connection:
        place.wait_until(lambda: connection.execute(counted).scalar() == 1)
    engine.dispose()
