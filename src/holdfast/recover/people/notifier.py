"""Send a message about each incident after its end, without delaying the supervision.

All input of the notifier is in the ledger. So if a supervisor is killed, the next one sends the
remaining messages. A message that was sent but not recorded before the kill is sent a second time.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import HoldfastError
from holdfast.core.explanation.narration import narrate
from holdfast.core.ledger import Event, Ledger
from holdfast.core.paths import RunPaths
from holdfast.recover.people.decisions import PROPOSALS, open_proposal
from holdfast.recover.people.messages import STORM_S, Known, due, proposal_due_s

SEND_LIMIT_S = 30.0
"""The seconds that one attempt to send may take."""
RETRIES_S = (2.0, 15.0)
"""The seconds to wait before the second and before the last attempt to send."""
CLOSE_S = 30.0
"""The seconds that the end of a run may wait for its last message."""
LAST_WAIT_S = 1.0
"""The largest number of seconds to wait before another attempt to send, after the end of the run.
"""
JOURNAL_BYTES = 8 << 20
"""The number of bytes that are read from the end of the journal of steps for a message; 0 after an
attempt that took too long."""
LOOK_S = 60.0
"""The largest number of seconds between two looks at the clock, which may jump."""
SAVES = ("save_failed", "disk_full")
"""The kinds of events about a checkpoint that was not saved, or for which another was deleted."""
WAKING = (
    *("incident", "resolved", "resumed", "anomaly_class", "proposal", "observed", "ended"),
    *SAVES,
)
"""The kinds of observed events after which a message may be due."""
TOLD = ("notified", "notify_failed")
NOTE = "observed"
REPLAYS = ("replay", "anomaly_class")
READ = ("notify_on", *TOLD, *PROPOSALS, NOTE, *REPLAYS, *SAVES)
"""The kinds of recorded events on which messages depend."""

Send = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""A function that sends one message (see `sender.send`)."""


async def send_in_process(order: dict[str, Any]) -> dict[str, Any]:
    """Send one message in a separate process with a time limit (see `sender.send`)."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "holdfast.recover.people.sender", str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    everything = list(range(len(order["urls"])))
    try:
        async with asyncio.timeout(SEND_LIMIT_S):
            output, _ = await process.communicate(json.dumps(order).encode())
        answer = json.loads(output)
        failed = [int(place) for place in answer["failed"]]
        return {"failed": failed, "why": str(answer["why"])[:500]}
    except TimeoutError:
        why = f"no answer within {SEND_LIMIT_S:g} s"
        return {"failed": everything, "why": why, "is_late": True}
    except (ValueError, KeyError, TypeError):
        return {"failed": everything, "why": "the sending process failed"}
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class Notifier:
    """The messages to people about one run."""

    def __init__(
        self,
        urls: Sequence[str],
        paths: RunPaths,
        ledger: Ledger,
        observe: Callable[[str, Mapping[str, Any]], None],
        *,
        clock: Clock | None = None,
        send: Send = send_in_process,
    ) -> None:
        """Store the destinations; `start` begins to send.

        Args:
            urls: the destinations of messages; if empty, no message is sent.
            paths: the paths of the run.
            ledger: the ledger that holds the run.
            observe: a function that receives a report of each problem.
            clock: the clock of the records.
            send: a function that sends one message.
        """
        self._urls = list(urls)
        self._paths = paths
        self._ledger = ledger
        self._observe = observe
        self._clock = clock or SystemClock()
        self._send = send
        self._wake = asyncio.Event()
        self._over = asyncio.Event()
        self._done: set[tuple[str, int]] = set()
        """The incidents and proposals that were handled here, even if the ledger could not record
        this.
        """
        self._saves_until_s = 0.0
        """The time of the last event of `SAVES` that was handled here."""
        self._about: dict[str, Any] | None = None
        """The incidents and proposals of the message that is being sent."""
        self._why = ""
        """The reason why the last attempt to send the present message failed."""
        self._task: asyncio.Task[None] | None = None

    def start(self, *, anew: bool) -> None:
        """Begin to send.

        Args:
            anew: True if a person has started or resumed the run, so that no message about earlier
                incidents is due.
        """
        if not self._urls:
            return
        if anew or not self._events("notify_on"):
            self._record("notify_on", {})
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:  # the run continues without messages
            self._complain(repr(error))

    def observed(self, kind: str) -> None:
        """Look for due messages, if an event of this kind can make one due."""
        if kind in WAKING:
            self._wake.set()

    async def close(self, *, leads: bool) -> None:
        """Send the remaining messages within a time limit; send none if another supervisor leads."""
        if self._task is None:
            return
        if leads:
            self._over.set()
            self._wake.set()
            await asyncio.wait([self._task], timeout=CLOSE_S)
            if not self._task.done():
                why = f"{self._why or 'no answer yet'}; the run has ended, and there is no more time to try"
                if self._about is not None:
                    self._record("notify_failed", {**self._about, "why": why})
                self._complain(why)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            is_over = self._over.is_set()
            try:
                incidents, waiting, next_s = await asyncio.to_thread(self._due, is_over)
            except HoldfastError as error:  # the ledger cannot be read now
                self._observe("trouble", {"text": f"Messages cannot be composed yet: {error}"})
                incidents, waiting, next_s = (), _Waiting(), None
            if incidents or waiting.has_texts:
                await self._deliver(incidents, waiting)
                continue
            if is_over:
                return
            wait_s = LOOK_S
            if next_s is not None:
                wait_s = max(0.0, min(wait_s, next_s - self._clock.now_s()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    def _due(self, is_over: bool) -> "tuple[tuple[int, ...], _Waiting, float | None]":
        """Return the incidents and proposals with a due message, and the time of the next look."""
        events = self._ledger.events(self._paths.run_id, kinds=READ)
        since_s = max((one.at_s for one in events if one.kind == "notify_on"), default=0.0)
        already_sent = [one for one in events if one.kind in TOLD]
        sent = {each for one in already_sent for each in one.data.get("incidents", ())}
        run = self._ledger.run(self._paths.run_id)
        incidents = self._ledger.incidents(self._paths.run_id)
        last = next((one for one in reversed(events) if one.kind in REPLAYS), None)
        replayed = last.data.get("incident_id") if last is not None else None
        ends_s = [one.detected_at_s for one in incidents[1:]] + [None] * bool(incidents)
        known = [
            Known(
                incident_id=one.incident_id,
                detected_at_s=one.detected_at_s,
                over_at_s=after_s
                if one.resumed_at_s is None or one.incident_id == replayed
                else one.resumed_at_s,
            )
            for one, after_s in zip(incidents, ends_s, strict=True)
            if one.incident_id is not None
            and one.incident_id not in sent
            and ("incident", one.incident_id) not in self._done
            and one.detected_at_s >= since_s
        ]
        last_s = max((one.at_s for one in already_sent if one.data.get("incidents")), default=None)
        is_over = is_over or run.state != "running"
        now_s = self._clock.now_s()
        ids, next_s = due(known, last_sent_s=last_s, now_s=now_s, is_over=is_over)
        attempts = self._ledger.attempts(self._paths.run_id)
        newest = max((one.number for one in attempts), default=0)
        waiting, due_s = _waiting(events, newest)
        if ("proposal", waiting.number) in self._done:
            waiting = _Waiting()
        elif due_s > now_s:
            waiting, next_s = _Waiting(), due_s if next_s is None else min(due_s, next_s)
        alerts, until_s, due_s = _failed_saves(events, max(since_s, self._saves_until_s))
        if alerts and due_s > now_s and not is_over:
            next_s = due_s if next_s is None else min(due_s, next_s)
        elif alerts:
            waiting = replace(waiting, alerts=alerts, saves_until_s=until_s)
        return ids, waiting, next_s

    async def _deliver(self, incidents: Sequence[int], waiting: "_Waiting") -> None:
        order: dict[str, Any] = {
            "ledger": self._ledger.url,
            "home": str(self._paths.home),
            "run": self._paths.run_id,
            "incidents": list(incidents),
            "proposals": list(waiting.proposals),
            "notes": list(waiting.notes),
            "alerts": list(waiting.alerts),
            "journal_bytes": JOURNAL_BYTES,
        }
        about: dict[str, Any] = {"incidents": list(incidents), "proposals": waiting.numbers}
        if waiting.alerts:
            about["saves_until_s"] = waiting.saves_until_s
        self._about, self._why, urls = about, "", self._urls
        for wait_s in (0.0, *RETRIES_S):
            await self._pause(wait_s)
            try:
                answer = await self._send({**order, "urls": urls})
            except OSError as error:  # no process can be started
                answer = {"failed": range(len(urls)), "why": str(error)}
            urls, self._why = [urls[place] for place in answer["failed"]], answer["why"]
            if answer.get("is_late"):
                order["journal_bytes"] = 0
            if not urls:
                break
        self._about = None
        self._done |= {("incident", one) for one in incidents}
        self._done |= {("proposal", one) for one in waiting.numbers}
        self._saves_until_s = max(self._saves_until_s, waiting.saves_until_s)
        if urls:
            await asyncio.to_thread(self._record, "notify_failed", {**about, "why": self._why})
            self._complain(self._why)
        else:
            await asyncio.to_thread(self._record, "notified", about)

    async def _pause(self, wait_s: float) -> None:
        """Wait before an attempt to send, but only briefly after the end of the run."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._over.wait()
                await asyncio.sleep(LAST_WAIT_S)

    def _complain(self, why: str) -> None:
        self._observe("trouble", {"text": f"A message could not be sent: {why}."})

    def _events(self, kind: str) -> list[Event]:
        try:
            return self._ledger.events(self._paths.run_id, kind=kind)
        except HoldfastError:
            return []

    def _record(self, kind: str, data: dict[str, Any]) -> None:
        try:
            attempts = self._ledger.attempts(self._paths.run_id)
            self._ledger.add_event(
                Event(
                    run_id=self._paths.run_id,
                    attempt=attempts[-1].number if attempts else 0,
                    at_s=self._clock.now_s(),
                    kind=kind,
                    data=data,
                )
            )
        except HoldfastError as error:
            self._observe("trouble", {"text": str(error)})


@dataclass(frozen=True, kw_only=True)
class _Waiting:
    """A proposal, a finding that is only observed, or trouble with saves, without a message yet."""

    number: int | None = None
    proposals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    alerts: tuple[str, ...] = ()
    saves_until_s: float = 0.0
    """The time of the last event that `alerts` are about, in Unix seconds."""

    @property
    def has_texts(self) -> bool:
        return bool(self.proposals or self.notes or self.alerts)

    @property
    def numbers(self) -> list[int]:
        return [] if self.number is None else [self.number]


def _waiting(events: Sequence[Event], newest: int) -> tuple[_Waiting, float]:
    """Return the proposal or finding without a message, and the earliest time for a message.

    The time is in Unix seconds.

    Args:
        events: the events of the run with the kinds `READ`.
        newest: the number of the newest attempt.
    """
    found = [(one.kind, one.attempt, one.data) for one in events if one.kind in PROPOSALS]
    notes = [one.data for one in events if (one.kind, one.attempt) == (NOTE, newest)]
    waits = open_proposal(found, newest)
    is_note = waits is None and bool(notes)
    if is_note:
        waits = notes[-1]
    sent_s = {
        number: one.at_s
        for one in events
        if one.kind in TOLD
        for number in one.data.get("proposals", ())
    }
    number = None if waits is None else waits.get("number")
    if waits is None or number is None or number in sent_s:
        return _Waiting(), 0.0
    about = [one for one in events if one.kind in ("proposal", NOTE)]
    before = [
        (str(one.data.get("finding")), sent_s[one.data["number"]])
        for one in about
        if one.data.get("number") in sent_s
    ]
    due_s = proposal_due_s(str(waits.get("finding")), before)
    texts = (str(waits["text"]),)
    if is_note:
        return _Waiting(number=int(number), notes=texts), due_s
    return _Waiting(number=int(number), proposals=texts), due_s


def _told(event: Event) -> str:
    try:
        return str(narrate(event.kind, event.data))
    except (KeyError, TypeError):  # the script itself has emitted an event of this kind
        return f"the script reported {event.kind}"


def _failed_saves(events: Sequence[Event], since_s: float) -> tuple[tuple[str, ...], float, float]:
    """Return a text for each kind of trouble with saves about which no message was sent.

    The other values are the time of the last event of these texts, and the earliest time for a
    message, in Unix seconds.

    Args:
        events: the events of the run with the kinds `READ`.
        since_s: the time of the last event that needs no message.
    """
    told = [one for one in events if one.kind in TOLD and "saves_until_s" in one.data]
    since_s = max(since_s, *(float(one.data["saves_until_s"]) for one in told), 0.0)
    fresh = [one for one in events if one.kind in SAVES and one.at_s > since_s]
    texts = []
    for kind in SAVES:
        found = [one for one in fresh if one.kind == kind]
        if found:
            often = "" if len(found) == 1 else f"{len(found)} times, the last time: "
            texts.append(f"{often}{_told(found[-1])}")
    due_s = max((one.at_s + STORM_S for one in told), default=0.0)
    return tuple(texts), max((one.at_s for one in fresh), default=0.0), due_s
