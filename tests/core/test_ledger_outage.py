"""A real PostgreSQL that is killed while records are written: each record arrives once."""

from dataclasses import replace

import pytest
from ledger_records import ATTEMPT, EVENT, INCIDENT, RUN

from holdfast.core.errors import LedgerError, LedgerUnreachable
from holdfast.core.ledger import Ledger, LedgerThread, ledger_thread
from holdfast.testing.postgresql import PrivatePostgreSQL, postgresql_binaries

psycopg = pytest.importorskip("psycopg")
if postgresql_binaries() is None:
    pytest.skip("no PostgreSQL server is installed", allow_module_level=True)


@pytest.fixture(scope="module")
def server():
    with PrivatePostgreSQL() as server:
        yield server


@pytest.fixture(scope="module")
def url(server):
    return server.new_database()


@pytest.fixture
def ledger(url):
    with Ledger.open(url) as ledger:
        ledger.add_run(RUN)
        yield ledger
        ledger.remove_run(RUN.run_id)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(ledger_thread, "REPEAT_S", 0.01)


def event(number):
    return replace(EVENT, at_s=float(number), data={"number": number, "pair": (1, 2)})


def numbers(ledger):
    return [one.data["number"] for one in ledger.events("a")]


def break_the_next_commit(ledger, monkeypatch):
    """Let the server commit once more, and lose the connection before the answer arrives."""
    commit, breaks = ledger._engine.dialect.do_commit, [True]

    def commit_and_break(connection):
        commit(connection)
        if breaks:
            breaks.pop()
            connection.dbapi_connection.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(ledger._engine.dialect, "do_commit", commit_and_break)


def test_records_of_an_outage_arrive_in_order_and_once(server, ledger):
    thread = LedgerThread(ledger, wait_s=0.0, close_s=240.0)
    thread.start()
    for number in range(10):
        thread.later(lambda ledger, number=number: ledger.add_event(event(number)))
    server.kill()
    for number in range(10, 20):
        thread.later(lambda ledger, number=number: ledger.add_event(event(number)))
    with pytest.raises(LedgerError, match="its records wait"):
        thread.ledger.add_incident(INCIDENT)
    server.start()
    thread.close()
    assert numbers(ledger) == list(range(20))
    (incident,) = ledger.incidents()
    assert replace(incident, incident_id=None) == INCIDENT
    errors = thread.take_errors()
    assert any("cannot be reached" in one and "its records wait" in one for one in errors), errors


@pytest.mark.parametrize(
    ("add", "recorded"),
    [
        (lambda ledger: ledger.add_event(event(1)), numbers),
        (
            lambda ledger: ledger.add_events([event(1), event(2)]),
            lambda ledger: numbers(ledger)[1:],
        ),
        (lambda ledger: ledger.add_attempt(ATTEMPT), lambda ledger: ledger.attempts("a")),
        (lambda ledger: ledger.add_incident(INCIDENT), lambda ledger: ledger.incidents()),
    ],
    ids=["event", "events", "attempt", "incident"],
)
def test_a_commit_whose_answer_is_lost_is_not_repeated(ledger, monkeypatch, add, recorded):
    thread = LedgerThread(ledger, close_s=240.0)
    thread.start()
    break_the_next_commit(ledger, monkeypatch)
    answer = thread.call(add)
    assert len(recorded(ledger)) == 1
    if answer is not None:
        assert ledger.incident(answer).kind == INCIDENT.kind
    thread.close()
    (error,) = thread.take_errors()
    assert "server closed the connection unexpectedly" in error


def test_a_repeated_operation_adds_what_was_not_recorded(ledger):
    for one in (ledger, ledger.repeating()):
        one.add_events([event(3), event(4)])
    ledger.repeating().add_events([event(5), event(6)])
    assert numbers(ledger) == [3, 4, 5, 6]
    assert ledger.add_incident(INCIDENT) == ledger.repeating().add_incident(INCIDENT)
    other = replace(INCIDENT, attempt=2)
    assert ledger.repeating().add_incident(other) != ledger.repeating().add_incident(INCIDENT)


def test_a_server_that_cannot_be_reached_is_told_from_one_that_refuses(server, ledger):
    with pytest.raises(LedgerError) as refused:
        ledger.add_event(replace(EVENT, kind="k" * 65))
    assert not isinstance(refused.value, LedgerUnreachable)
    server.kill()
    try:
        for use in (lambda: ledger.add_event(event(1)), ledger.runs):
            with pytest.raises(LedgerUnreachable, match=r"cannot be reached: .+\. Check that its"):
                use()
        with pytest.raises(LedgerUnreachable), ledger.bounded_reading(5.0):
            pass
    finally:
        server.start()
    assert ledger.runs() == [RUN]
