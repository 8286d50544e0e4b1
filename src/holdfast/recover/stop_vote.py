"""The supervisor's side of stopping with state saved: finds a step that every rank can still stop at.

Pure but for sending: told the votes, it answers with what to send. See `attach._StopAgreement` for the ranks' side.
"""

import math
from typing import Any

LEAD_S = 0.5
"""How far ahead of the ranks the first proposal lies, so that it reaches all before the step does."""


class StopVote:
    """One stop of one attempt."""

    def __init__(
        self, ranks: frozenset[int], median_step_s: float | None, *, first: int = 0
    ) -> None:
        self._ranks = ranks
        self._lead_steps = max(1, math.ceil(LEAD_S / median_step_s)) if median_step_s else 1
        self._proposal = first
        self._yes: dict[int, bool] = {}
        self._left: set[int] = set()
        self.can_save = True
        """False once every rank said that it never called `save`."""
        self._saves: dict[int, bool] = {}
        self._last_save_step = 0

    def propose(self, last_step: int | None) -> dict[str, Any]:
        """The message that opens a vote; each further one looks twice as far ahead."""
        self._proposal += 1
        self._yes.clear()
        # A rank that reports no steps still tells by its vote where it is.
        step = max(last_step or 0, self._last_save_step) + self._lead_steps
        self._lead_steps *= 2
        return {"kind": "propose", "proposal": self._proposal, "step": step}

    def voted(self, rank: int, message: dict[str, Any]) -> dict[str, Any] | None:
        """Take in a vote; returns the decision to send once all voted."""
        if message["proposal"] != self._proposal or rank not in self._ranks:
            return None
        self._yes[rank] = bool(message["yes"])
        self._saves[rank] = bool(message["saves"])
        self._last_save_step = max(self._last_save_step, int(message.get("step") or 0))
        if set(self._yes) != self._ranks:
            return None
        self.can_save = any(self._saves.values())
        return {"kind": "decide", "proposal": self._proposal, "commit": all(self._yes.values())}

    def left(self, rank: int) -> bool:
        """A rank saved and leaves; true once all did."""
        self._left.add(rank)
        return self._left >= self._ranks
