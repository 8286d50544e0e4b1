"""The stream of changes to the browsers: server-sent events whose ids are positions in the ledger.

One task looks at the ledger for all browsers. A browser has no queue, only a count of the changes
that were sent. A browser that falls more than `CHANGES_KEPT` changes behind receives one snapshot
event, and loads its page again.
"""

import asyncio
import contextlib
import json
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial

from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Ledger
from holdfast.ui.console.queries import changes
from holdfast.ui.console.queries.changes import Change, Position

LOOK_S = 0.5
"""At most two events a second to each browser."""
HEARTBEAT_S = 15.0
RETRY_MS = 3000
CHANGES_KEPT = 64
STREAMS_LIMIT = 200
LIMIT_S = 1.0


class Hub:
    """The changes that one console has seen."""

    def __init__(
        self, ledger: Ledger, *, look_s: float = LOOK_S, heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        self._ledger = ledger
        self._look_s = look_s
        self._heartbeat_s = heartbeat_s
        self._kept: deque[Change] = deque(maxlen=CHANGES_KEPT)
        self._count = 0
        self._position: Position | None = None
        self._states: dict[str, tuple[object, ...]] = {}
        self._announced: deque[str] = deque()
        """The targets that changed without a new row of the ledger."""
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._trouble = ""
        """The reason why the last look failed; empty if the last look did not fail."""
        self.streams = 0
        """The browsers that listen."""

    def start(self) -> None:
        """Begin to look at the ledger, in the running event loop."""
        self._task = asyncio.create_task(self._look_again_and_again())

    def announce(self, target: str) -> None:
        """Send a change that is no new row of the ledger. Any thread may call this."""
        self._announced.append(target)

    async def close(self) -> None:
        """End the task, and every stream with it."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _look_again_and_again(self) -> None:
        while True:
            trouble = ""
            try:
                change = await asyncio.to_thread(self._look)
            except HoldfastError as error:
                change, trouble = None, str(error)  # the next look finds the missed changes
            except Exception:  # the streams must not go silent: their pages would look up to date
                traceback.print_exc()
                change = None
            if change is not None or trouble != self._trouble:
                async with self._changed:
                    self._trouble = trouble
                    if change is not None:
                        self._kept.append(change)
                        self._count += 1
                    self._changed.notify_all()
            await asyncio.sleep(self._look_s)

    def _look(self) -> Change | None:
        with self._ledger.bounded_reading(LIMIT_S) as connection:
            if self._position is None:
                self._position = changes.newest(connection)
                self._states = dict(changes.states(connection))
                return None
            change = changes.since(connection, self._position)
            states = dict(changes.states(connection))
        moved = {run_id for run_id, state in states.items() if self._states.get(run_id) != state}
        moved |= self._states.keys() - states.keys()
        while self._announced:
            moved.add(self._announced.popleft())
        is_news = change.position != self._position or moved
        self._position, self._states = change.position, states
        if not is_news:
            return None
        return Change(change.position, change.targets | moved, change.is_snapshot)

    def _since(self, position: Position) -> Change:
        try:
            with self._ledger.bounded_reading(LIMIT_S) as connection:
                return changes.since(connection, position)
        except HoldfastError:  # the changes since `position` are unknown
            return Change(position, frozenset(), is_snapshot=True)

    def _is_past(self, sent: int, trouble: str) -> bool:
        return self._count > sent or self._trouble != trouble

    async def events(self, last_id: str, is_allowed: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Yield the events for one browser until the browser disconnects or its session ends.

        The event `ledger` has the reason why the ledger cannot be read, or an empty text once the
        ledger can be read again.

        Args:
            last_id: the browser's `Last-Event-ID`, or nothing.
            is_allowed: returns True while the browser's session lasts.
        """
        self.streams += 1
        try:
            sent, trouble = self._count, ""
            yield f"retry: {RETRY_MS}\n: open\n\n".encode()
            position = changes.position_of(last_id)
            if position is not None:
                missed = await asyncio.to_thread(self._since, position)
                if missed.is_snapshot or missed.position != position:
                    yield encoded(missed)
            while is_allowed():
                async with self._changed:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._heartbeat_s):
                            await self._changed.wait_for(partial(self._is_past, sent, trouble))
                    behind, kept = self._count - sent, list(self._kept)
                    sent, before, trouble = self._count, trouble, self._trouble
                if trouble != before:
                    yield f"event: ledger\ndata: {json.dumps({'trouble': trouble})}\n\n".encode()
                yield (
                    encoded(merged(kept[-behind:], is_late=behind > len(kept)))
                    if behind
                    else b": alive\n\n"
                )
        finally:
            self.streams -= 1


def merged(found: list[Change], *, is_late: bool) -> Change:
    """Return several changes as one; a snapshot if any of them is missing."""
    targets = frozenset().union(*(one.targets for one in found))
    is_snapshot = is_late or any(one.is_snapshot for one in found)
    return Change(found[-1].position, frozenset() if is_snapshot else targets, is_snapshot)


def encoded(change: Change) -> bytes:
    """Return one server-sent event."""
    kind = "snapshot" if change.is_snapshot else "changed"
    data = json.dumps({"targets": sorted(change.targets)})
    return f"id: {change.id}\nevent: {kind}\ndata: {data}\n\n".encode()
