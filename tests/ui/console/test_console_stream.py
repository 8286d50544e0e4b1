"""The stream of changes since a position of the ledger, also for an absent or slow browser."""

import asyncio
import json

import pytest
from console_home import open_console, propose

from holdfast.core.errors import LedgerUnreachable
from holdfast.core.ledger import Ledger
from holdfast.core.paths import ledger_url
from holdfast.ui.console.queries import changes
from holdfast.ui.console.stream import CHANGES_KEPT, STREAMS_LIMIT, Hub

WAIT_S = 240.0


@pytest.fixture
def ledger(home):
    with Ledger.open(ledger_url(home)) as opened:
        yield opened


def parsed(event):
    fields = dict(
        line.split(": ", 1)
        for line in event.decode().strip().splitlines()
        if not line.startswith(":")
    )
    return (
        fields.get("event"),
        fields.get("id"),
        json.loads(fields.get("data", "{}")).get("targets"),
    )


async def next_event(events):
    async with asyncio.timeout(WAIT_S):
        while True:
            event = await anext(events)
            if b"data:" in event:
                return parsed(event)


def test_a_browser_that_returns_gets_what_it_missed_from_the_ledger(ledger):
    with ledger.bounded_reading(5.0) as reading:
        before = changes.newest(reading)
    propose(ledger, "demo-1", 3)

    async def returned():
        hub = Hub(ledger, look_s=0.01, heartbeat_s=0.05)  # another console than the one before
        hub.start()
        events = hub.events(".".join(map(str, before)), lambda: True)
        missed = await next_event(events)
        await events.aclose()
        again = hub.events(missed[1], lambda: hub.streams > 1)
        await anext(again)
        assert [event async for event in again] == [], "nothing twice"
        await hub.close()
        return missed

    kind, _, targets = asyncio.run(returned())
    assert (kind, targets) == ("changed", ["demo-1"])


def test_a_change_reaches_a_listening_browser(ledger):
    async def listening():
        hub = Hub(ledger, look_s=0.01, heartbeat_s=0.05)
        hub.start()
        events = hub.events("", lambda: True)
        await anext(events)
        while hub._position is None:
            await asyncio.sleep(0)
        ledger.set_run("demo-1", state="running")  # no new row: the state of a run that goes on
        told = await next_event(events)
        await events.aclose()
        await hub.close()
        assert hub.streams == 0
        return told

    kind, _, targets = asyncio.run(listening())
    assert (kind, targets) == ("changed", ["demo-1"])


def test_a_look_that_fails_in_an_unforeseen_way_does_not_silence_the_streams(
    ledger, monkeypatch, capsys
):
    async def failing_once():
        hub = Hub(ledger, look_s=0.01, heartbeat_s=0.05)
        look, failures = hub._look, [RuntimeError("unforeseen")]

        def look_or_fail():
            if hub._position is not None and failures:
                raise failures.pop()
            return look()

        monkeypatch.setattr(hub, "_look", look_or_fail)
        hub.start()
        events = hub.events("", lambda: True)
        await anext(events)
        async with asyncio.timeout(WAIT_S):
            while failures:
                await asyncio.sleep(0.01)
        propose(ledger, "demo-1", 3)
        told = await next_event(events)
        await events.aclose()
        await hub.close()
        return told

    assert asyncio.run(failing_once())[2] == ["demo-1"]
    assert "unforeseen" in capsys.readouterr().err


def test_a_ledger_that_is_away_is_reported_and_so_is_its_return(ledger, monkeypatch):
    def away(_limit_s):
        raise LedgerUnreachable("The server is away.")

    async def next_report(events):
        async with asyncio.timeout(WAIT_S):
            while True:
                event = await anext(events)
                if event.startswith(b"event: ledger"):
                    return json.loads(event.partition(b"data: ")[2])["trouble"]

    async def outage():
        hub = Hub(ledger, look_s=0.01, heartbeat_s=0.05)
        with monkeypatch.context() as patch:
            patch.setattr(ledger, "bounded_reading", away)
            hub.start()
            events = hub.events("1.2.3.4", lambda: True)
            await anext(events)
            assert (await next_event(events))[0] == "snapshot", "what was missed is not known"
            reports = [await next_report(events)]
        reports.append(await next_report(events))
        await events.aclose()
        await hub.close()
        return reports

    assert asyncio.run(outage()) == ["The server is away.", ""]


def test_a_slow_browser_is_sent_one_snapshot_and_no_queue(ledger):
    async def slow():
        hub = Hub(ledger, look_s=3600.0, heartbeat_s=0.05)
        events = hub.events("", lambda: True)
        await anext(events)
        for number in range(CHANGES_KEPT + 10):
            hub._kept.append(changes.Change((number, 0, 0, 0), frozenset({f"run-{number}"})))
            hub._count += 1
        told = await next_event(events)
        await events.aclose()
        assert len(hub._kept) == CHANGES_KEPT
        return told

    kind, where, targets = asyncio.run(slow())
    assert (kind, where, targets) == ("snapshot", f"{CHANGES_KEPT + 9}.0.0.0", [])


@pytest.mark.parametrize("position", ["0.0.0.0", "999999.0.0.0"])
def test_too_much_news_or_another_ledger_is_a_snapshot(ledger, position):
    for _ in range(changes.ROWS_LIMIT + 1):
        propose(ledger, "demo-1", 3)
    with ledger.bounded_reading(5.0) as reading:
        assert changes.since(reading, changes.position_of(position)).is_snapshot


@pytest.mark.parametrize(
    "text", ["", "1.2.3", "a.b.c.d", "1.2.3.4.5", "-1.0.0.0", "9" * 30 + ".0.0.0"]
)
def test_a_damaged_position_is_none(text):
    assert changes.position_of(text) is None


def test_a_stream_ends_with_its_session(ledger):
    async def ended():
        hub = Hub(ledger, look_s=3600.0, heartbeat_s=0.01)
        left = [True, True, False]
        return [event async for event in hub.events("", lambda: left.pop(0))]

    assert asyncio.run(ended())[1:] == [b": alive\n\n"] * 2


def test_there_is_a_limit_to_the_streams(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.ui.console.pages.STREAMS_LIMIT", 0)
    with open_console(tmp_path) as console:
        answer = console.get("/stream")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "30"
    assert STREAMS_LIMIT > 0
