"""Send a message about each incident once it is over, beside the supervision and without holding it up.

All that the notifier goes by is in the ledger, so that the supervisor after a killed one sends what that one has not
sent. A message that was sent and not recorded any more is sent once more.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Event, Ledger
from holdfast.core.paths import RunPaths
from holdfast.recover.people.decisions import PROPOSALS, open_proposal
from holdfast.recover.people.messages import Known, due

SEND_LIMIT_S = 30.0
"""How long one try may take."""
RETRIES_S = (2.0, 15.0)
"""The waits before the second try and before the last one."""
CLOSE_S = 30.0
"""How long the end of a run may wait for its last message."""
LOOK_S = 60.0
"""At least so often the time is looked at, since clocks jump."""
WAKING = ("incident", "resolved", "resumed", "proposal", "ended")
"""The kinds of the observer after which a message may be due."""

Send = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Sends one message, see `sender.send`."""


async def send_in_process(order: dict[str, Any]) -> dict[str, Any]:
    """Send one message in a process of its own, for a limited time; see `sender.send`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "holdfast.recover.people.sender", str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    everything = list(range(len(order["urls"])))
    try:
        async with asyncio.timeout(SEND_LIMIT_S):
            said, _ = await process.communicate(json.dumps(order).encode())
        answer = json.loads(said)
        failed = [int(place) for place in answer["failed"]]
        return {"failed": failed, "why": str(answer["why"])[:500]}
    except TimeoutError:
        return {"failed": everything, "why": f"no answer within {SEND_LIMIT_S:g} s"}
    except (ValueError, KeyError, TypeError):
        return {"failed": everything, "why": "the sending process failed"}
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class Notifier:
    """The messages of one run."""

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
        """Begin without sending.

        Args:
            urls: where messages go; none: nothing is sent.
            paths: of the run.
            ledger: holds the run.
            observe: receives complaints.
            clock: the time of the records.
            send: sends one message.
        """
        self._urls = list(urls)
        self._paths = paths
        self._ledger = ledger
        self._observe = observe
        self._clock = clock or SystemClock()
        self._send = send
        self._wake = asyncio.Event()
        self._is_over = False
        self._done: set[tuple[str, int]] = set()
        """The incidents and proposals that were dealt with here, also where the ledger could not take that."""
        self._about: dict[str, Any] | None = None
        """What is being sent."""
        self._task: asyncio.Task[None] | None = None

    def start(self, *, anew: bool) -> None:
        """Begin to send.

        Args:
            anew: a person has started or resumed the run, so that earlier incidents are known.
        """
        if not self._urls:
            return
        if anew or not self._events("notify_on"):
            self._record("notify_on", {})
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:  # the run goes on without messages
            self._complain(repr(error))

    def observed(self, kind: str) -> None:
        """Take in that something has happened."""
        if kind in WAKING:
            self._wake.set()

    async def close(self, *, leads: bool) -> None:
        """Send the messages that are left, for a limited time; none where another supervisor leads the run."""
        if self._task is None:
            return
        if leads:
            self._is_over = True
            self._wake.set()
            await asyncio.wait([self._task], timeout=CLOSE_S)
            if not self._task.done():
                why = "the run has ended, and there is no more time to try"
                if self._about is not None:
                    self._record("notify_failed", {**self._about, "why": why})
                self._complain(why)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            is_over = self._is_over
            try:
                incidents, proposals, next_s = await asyncio.to_thread(self._due, is_over)
            except HoldfastError as error:  # the ledger cannot be read for a while
                self._observe("trouble", {"text": f"Messages cannot be prepared yet: {error}"})
                incidents, proposals, next_s = (), {}, None
            if incidents or proposals:
                await self._deliver(incidents, proposals)
                continue
            if is_over:
                return
            wait_s = LOOK_S
            if next_s is not None:
                wait_s = max(0.0, min(wait_s, next_s - self._clock.now_s()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    def _due(self, is_over: bool) -> tuple[tuple[int, ...], dict[int, str], float | None]:
        """Return the incidents and the proposals that a message is due for, and when to look again."""
        events = self._ledger.events(self._paths.run_id)
        since_s = max((one.at_s for one in events if one.kind == "notify_on"), default=0.0)
        told = [one for one in events if one.kind in ("notified", "notify_failed")]
        sent = {each for one in told for each in one.data.get("incidents", ())}
        run = self._ledger.run(self._paths.run_id)
        incidents = self._ledger.incidents(self._paths.run_id)
        ends_s = [one.detected_at_s for one in incidents[1:]] + [None] * bool(incidents)
        known = [
            Known(
                incident_id=one.incident_id,
                detected_at_s=one.detected_at_s,
                over_at_s=after_s if one.resumed_at_s is None else one.resumed_at_s,
            )
            for one, after_s in zip(incidents, ends_s, strict=True)
            if one.incident_id is not None
            and one.incident_id not in sent
            and ("incident", one.incident_id) not in self._done
            and one.detected_at_s >= since_s
        ]
        last_s = max((one.at_s for one in told if one.data.get("incidents")), default=None)
        ids, next_s = due(
            known,
            last_sent_s=last_s,
            now_s=self._clock.now_s(),
            is_over=is_over or run.state != "running",
        )
        attempts = self._ledger.attempts(self._paths.run_id)
        newest = max((one.number for one in attempts), default=0)
        proposals = _proposals(events, told, newest)
        proposals = {
            number: text
            for number, text in proposals.items()
            if ("proposal", number) not in self._done
        }
        return ids, proposals, next_s

    async def _deliver(self, incidents: Sequence[int], proposals: Mapping[int, str]) -> None:
        order: dict[str, Any] = {
            "ledger": self._ledger.url,
            "home": str(self._paths.home),
            "run": self._paths.run_id,
            "incidents": list(incidents),
            "proposals": list(proposals.values()),
        }
        about = {"incidents": list(incidents), "proposals": list(proposals)}
        self._about, urls, why = about, self._urls, ""
        for wait_s in (0.0, *RETRIES_S):
            await asyncio.sleep(wait_s)
            try:
                answer = await self._send({**order, "urls": urls})
            except OSError as error:  # no process is to be had
                answer = {"failed": range(len(urls)), "why": str(error)}
            urls, why = [urls[place] for place in answer["failed"]], answer["why"]
            if not urls:
                break
        self._about = None
        self._done |= {("incident", one) for one in incidents}
        self._done |= {("proposal", one) for one in proposals}
        if urls:
            await asyncio.to_thread(self._record, "notify_failed", {**about, "why": why})
            self._complain(why)
        else:
            await asyncio.to_thread(self._record, "notified", about)

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


def _proposals(events: Sequence[Event], told: Sequence[Event], newest: int) -> dict[int, str]:
    """Return the number and the text of the proposal that waits, if no message was sent about it.

    Args:
        events: of the run.
        told: those of messages.
        newest: the number of the newest attempt.
    """
    found = [(one.kind, one.attempt, one.data) for one in events if one.kind in PROPOSALS]
    waits = open_proposal(found, newest)
    sent = {each for one in told for each in one.data.get("proposals", ())}
    if waits is None or waits.get("number") in sent:
        return {}
    return {int(waits["number"]): str(waits["text"])}
