"""The sources of one node: only changes are sent, and a source that hangs hides no other."""

import asyncio
import threading
from types import SimpleNamespace

from holdfast.recover.signals.facts import CannotSee, NodeSignal, Notice
from holdfast.recover.signals.kernel import KernelLog
from holdfast.recover.signals.watch import REFRESH_S, STUCK_S, SignalWatch
from holdfast.testing.clock import FakeClock

SIGNAL = NodeSignal(source="a", name="link-down", where="eth0", text="eth0 is down")


def watch_of(clock=None):
    sent = []
    return SignalWatch([], sent.append, clock or FakeClock()), sent


def test_only_changes_are_sent_and_a_new_supervisor_receives_all_that_holds():
    clock = FakeClock()
    watch, sent = watch_of(clock)
    watch._took("a", (SIGNAL,), "")
    assert [message["kind"] for message in sent] == ["node_signal", "cannot_see"]
    assert sent[1]["sources"] == {"a": ""}
    watch._took("a", (SIGNAL,), "")
    assert len(sent) == 2
    more = NodeSignal(**{**SIGNAL.to_json(), "count": 2})
    watch._took("a", (more,), "")
    assert sent[2]["fact"]["count"] == 2
    clock.advance(7.0)
    facts, sources = watch.messages()
    assert (facts["fact"], facts["age_s"], facts["is_over"]) == (more.to_json(), 7.0, False)
    assert sources == {"kind": "cannot_see", "sources": {"a": ""}}
    watch._took("a", (), "")
    assert (sent[3]["fact"]["name"], sent[3]["is_over"]) == ("link-down", True)
    assert watch.messages() == [sources]


def test_a_state_that_holds_on_is_sent_again_and_a_line_of_the_kernels_log_is_not():
    clock = FakeClock()
    watch, sent = watch_of(clock)
    line = NodeSignal(source=KernelLog.name, name="gpu-lost", text="GPU is lost")
    for _ in range(2):
        watch._took("a", (SIGNAL,), "")
        watch._took(KernelLog.name, (line,), "")
        clock.advance(REFRESH_S)
    signals = [message["fact"]["source"] for message in sent if message["kind"] == "node_signal"]
    assert signals == ["a", KernelLog.name, "a"]
    assert [one["age_s"] for one in watch.messages()[:2]] == [REFRESH_S, 2 * REFRESH_S]


def test_what_cannot_be_seen_is_said_once_and_its_last_facts_hold_on():
    watch, sent = watch_of()
    watch._took("a", (SIGNAL,), "")
    for _ in range(3):
        watch._took("a", (), "no answer")
    assert sent[2:] == [{"kind": "cannot_see", "sources": {"a": "no answer"}}]
    assert watch.messages()[0]["fact"]["name"] == "link-down"


def test_a_notice_is_sent_with_the_seconds_left():
    clock = FakeClock(1000.0)
    watch, sent = watch_of(clock)
    watch._took("a", (Notice(source="a", kind="maintenance", text="t", until_s=1100.0),), "")
    assert (sent[0]["kind"], sent[0]["fact"]["left_s"]) == ("notice", 100.0)
    clock.advance(40.0)
    assert watch.messages()[0]["fact"]["left_s"] == 60.0


def test_a_source_that_hangs_or_fails_hides_no_other_one():
    clock, release = FakeClock(), threading.Event()

    def fail():
        raise ZeroDivisionError("bug")

    def hide():
        raise CannotSee("not here")

    reads = {"hangs": release.wait, "fails": fail, "hides": hide, "works": lambda: [SIGNAL]}
    sources = [
        SimpleNamespace(name=name, period_s=3600.0, read=read) for name, read in reads.items()
    ]

    async def run():
        sent = []
        watch = SignalWatch(sources, sent.append, clock)
        watch.start()
        async with asyncio.timeout(60):
            while len(sent) < 4 or "hangs" not in watch._reading_since_s:
                await asyncio.sleep(0.005)
        clock.advance(STUCK_S + 1)
        watch.look()
        watch.look()
        watch.close()
        return sent

    try:
        sent = asyncio.run(run())
    finally:
        release.set()
    hidden = {}
    for message in sent:
        hidden |= message.get("sources", {})
    assert hidden == {
        "hangs": "its read has not ended for 60 s",
        "fails": "ZeroDivisionError: bug",
        "hides": "not here",
        "works": "",
    }
    assert len(sent) == 5
