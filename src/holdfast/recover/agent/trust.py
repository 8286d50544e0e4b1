"""Find ranks that send false messages, or too many messages.

The ranks run the user's code, which may send anything. A rank with false or too many messages is
cut off, which means that its further messages are dropped, while its training continues. The checks
never reject an honest rank. For example, even thousands of steps per second are not too many
messages, since each message reports a new step.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.core.whole import whole_number
from holdfast.recover.channel import Peer

MAX_STEP = 2**53
"""The highest step that all parts of Holdfast can count."""
FLOOD_S = 10.0
FLOOD_MESSAGES = 10_000
"""The number of messages without a new step that a rank may send within `FLOOD_S` seconds."""
KNOWN_STEPS = 20
"""Leaps of the step are judged only after this number of reports of steps."""
LEAP = 1000
"""The largest allowed increase of the step, as a multiple of the largest increase so far."""
FUTURE_S = 60.0
LIES = 50
"""A rank is cut off after this number of consecutive messages with a time in the future. A single
one proves nothing, since the clock of the host may be set back while a message is on its way."""
MAX_ANCESTORS = 64


class Trust:
    """The judge of one rank's messages. The counts of messages are its only state."""

    def __init__(self) -> None:
        self._began_s = -math.inf
        self._count = 0
        """The number of messages without a new step since `_began_s`."""
        self._step: int | None = None
        self._steps = 0
        self._largest_increase = 1
        self._lies = 0

    def judge(self, message: Mapping[str, Any], now_s: float, wall_s: float) -> str:
        """Return why the rank must be cut off; an empty text if the message may be true.

        Args:
            message: the message of the rank.
            now_s: the monotonic time, in seconds.
            wall_s: the present time of this host's wall clock, in Unix seconds.
        """
        is_new, why = False, ""
        if message["kind"] == "step":
            is_new, why = self._judge_step(message, wall_s)
        return why or ("" if is_new else self._judge_rate(now_s))

    def _judge_step(self, message: Mapping[str, Any], wall_s: float) -> tuple[bool, str]:
        step = whole_number(message.get("step"))
        if step is None or not 0 <= step <= MAX_STEP:
            return False, f"it reports the impossible step {repr(message.get('step'))[:40]}"
        before, self._step = self._step, step
        self._steps += 1
        increase = 1 if before is None else step - before
        if self._steps > KNOWN_STEPS and increase > LEAP * self._largest_increase:
            return False, f"it reports the impossible step {step} after step {before}"
        self._largest_increase = max(self._largest_increase, increase)
        at_s = message.get("at_s")
        ahead_s = at_s - wall_s if isinstance(at_s, int | float) else 0.0
        self._lies = self._lies + 1 if ahead_s > FUTURE_S else 0
        if self._lies >= LIES:
            return False, f"it reports steps {ahead_s:.0f} s in the future"
        return increase > 0, ""

    def _judge_rate(self, now_s: float) -> str:
        if now_s - self._began_s > FLOOD_S:
            self._began_s, self._count = now_s, 0
        self._count += 1
        if self._count > FLOOD_MESSAGES:
            return f"it floods: {self._count} messages in {now_s - self._began_s:.1f} s"
        return ""


def why_not(peer: Peer, shims: Mapping[int, Peer], parent_of: Callable[[int], int | None]) -> str:
    """Return why a process cannot be the rank that it claims to be; an empty text if it may be.

    A process below the shim of another rank cannot be this rank, if this rank also has a shim. A
    script may start a second launcher. The ranks of that launcher are not refused, and are
    recognised by their different world size.

    Args:
        peer: the process, as it describes itself.
        shims: the shims of the node, by process id.
        parent_of: a function that returns the parent of a process; None if the process cannot be
            seen.
    """
    parent: int | None = peer.pid
    for _ in range(MAX_ANCESTORS):
        if parent is None or parent in shims:
            break
        parent = parent_of(parent)
    owner = shims.get(parent or 0)
    others = [shim.rank for shim in shims.values() if shim is not owner]
    if owner is None or owner.world_size != peer.world_size or peer.rank not in others:
        return ""
    return f"process {peer.pid} of rank {owner.rank} reports as this rank"
