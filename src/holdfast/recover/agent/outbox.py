"""Keep the messages of one node's ranks and shims until the supervisor has acknowledged them.

Each message has a number. Most messages are reports of steps. These wait for up to `SUM_S` seconds
and are sent together, so that the supervisor of a large job receives only one message per node and
interval, however many ranks there are. A rank's first report, and a report whose loss is not
finite, are sent at once. A message of another kind is also sent at once, together with the reports
that arrived before it.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.recover.channel import Peer

SUM_S = 0.2
"""The longest time, in seconds, that reports of steps wait to be sent together."""
MAX_REPORTS = 1024
"""The largest number of reports in one message, whose size is limited (`stream.MAX_BYTES`)."""
FULL_BYTES = 2 * 1024 * 1024
"""A message is full when it has this number of bytes of reports."""
KEPT_STEPS = 10_000
"""The largest number of reports of steps that are kept while there is no supervisor; the newest are
kept.
"""
KEPT_MESSAGES = 10_000


@dataclass(frozen=True)
class Envelope:
    """A message of a peer, with what the agent adds for the supervisor."""

    seq: int
    peer: Peer
    message: Mapping[str, Any]
    at_monotonic_s: float
    size_bytes: int
    """The size of the message in bytes."""

    def to_json(self, *, again: bool) -> dict[str, Any]:
        """Return the envelope as JSON, with the age that the message has now."""
        return {
            "kind": "peer",
            "seq": self.seq,
            "peer": vars(self.peer),
            "message": self.message,
            "age_s": time.monotonic() - self.at_monotonic_s,
            "again": again,
        }


class Outbox:
    """The messages from one node to the supervisor. Call all methods from one event loop."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        """Store `send`, a function that sends a message, or drops it while there is no supervisor."""
        self._send = send
        self._numbers = itertools.count(1)
        self._steps: deque[Envelope] = deque(maxlen=KEPT_STEPS)
        self._others: deque[Envelope] = deque(maxlen=KEPT_MESSAGES)
        self._waiting: list[Envelope] = []
        """The reports of steps that have not been sent yet."""
        self._waiting_bytes = 0
        self._known: set[Peer] = set()
        """The peers of which a report was already sent."""

    def put(
        self, peer: Peer, message: Mapping[str, Any], at_monotonic_s: float, size_bytes: int
    ) -> Envelope:
        """Give a message a number and keep it; send it at once, or later with other reports."""
        envelope = Envelope(next(self._numbers), peer, message, at_monotonic_s, size_bytes)
        if message["kind"] != "step":
            self._others.append(envelope)
            if message["kind"] == "gone":
                self._known.discard(peer)
            self.flush()
            self._send(envelope.to_json(again=False))
            return envelope
        self._steps.append(envelope)
        self._waiting.append(envelope)
        self._waiting_bytes += size_bytes
        is_full = len(self._waiting) >= MAX_REPORTS or self._waiting_bytes >= FULL_BYTES
        if is_full or peer not in self._known or not _is_ordinary(message.get("loss")):
            self._known.add(peer)
            self.flush()
        return envelope

    def flush(self) -> None:
        """Send the waiting reports."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if waiting:
            self._send(_together(waiting))

    def acknowledged(self, seq: int) -> None:
        """Drop the messages with numbers up to `seq`, which the supervisor has received."""
        for kept in (self._steps, self._others):
            while kept and kept[0].seq <= seq:
                kept.popleft()

    def unseen(self, seen: int) -> Iterator[dict[str, Any]]:
        """Yield all kept messages with numbers above `seen`, including the waiting reports."""
        self._waiting, self._waiting_bytes = [], 0
        left = sorted((*self._steps, *self._others), key=lambda envelope: envelope.seq)
        left = [envelope for envelope in left if envelope.seq > seen]
        for is_step, some in itertools.groupby(left, key=lambda one: one.message["kind"] == "step"):
            if is_step:
                yield from map(_together, _bounded(some))
            else:
                yield from (envelope.to_json(again=False) for envelope in some)


def _is_ordinary(loss: object) -> bool:
    return loss is None or (isinstance(loss, int | float) and math.isfinite(loss))


def _bounded(envelopes: Iterable[Envelope]) -> Iterator[list[Envelope]]:
    """Split envelopes into groups, each of which fits into one message."""
    part: list[Envelope] = []
    size_bytes = 0
    for envelope in envelopes:
        part.append(envelope)
        size_bytes += envelope.size_bytes
        if len(part) >= MAX_REPORTS or size_bytes >= FULL_BYTES:
            yield part
            part, size_bytes = [], 0
    if part:
        yield part


def _together(envelopes: Sequence[Envelope]) -> dict[str, Any]:
    """Combine reports of steps into one message."""
    places: dict[Peer, int] = {}
    now_s = time.monotonic()
    reports = [
        [
            envelope.seq,
            places.setdefault(envelope.peer, len(places)),
            round(now_s - envelope.at_monotonic_s, 4),
            envelope.message,
        ]
        for envelope in envelopes
    ]
    return {"kind": "steps", "peers": [vars(peer) for peer in places], "reports": reports}
