"""Stop a run after saving its state.

This module handles stop requests, the vote of the ranks on a step, and ranks that received SIGTERM.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.recover import policy
from holdfast.recover.attempt import AttemptView
from holdfast.recover.channel import Peer
from holdfast.recover.nodes import Nodes
from holdfast.recover.recorder import Recorder

SIGTERM_HOLD_S = 5.0
"""The longest time, in seconds, between the SIGTERM to a rank and the SIGTERM to the supervisor."""
LEAD_S = 0.5
"""The first proposal is this far ahead of the ranks' present steps, so that it reaches all ranks in
time.
"""
VOTES = 1_000_000
"""A number that is larger than the number of proposals that one supervisor makes."""


class StopVote:
    """Search for a step at which every rank can stop.

    `attach._StopAgreement` is the counterpart in the ranks.
    """

    def __init__(
        self, ranks: frozenset[int], median_step_s: float | None, *, first: int = 0
    ) -> None:
        self._ranks = ranks
        self._lead_steps = max(1, math.ceil(LEAD_S / median_step_s)) if median_step_s else 1
        self._proposal = first
        self._yes: dict[int, bool] = {}
        self._left: set[int] = set()
        self.can_save = True
        """False once every rank has reported that it never called `save`."""
        self._saves: dict[int, bool] = {}
        self._last_save_step = 0

    def propose(self, last_step: int | None) -> dict[str, Any]:
        """Return the message that proposes a step; each further proposal is twice as far ahead."""
        self._proposal += 1
        self._yes.clear()
        # The vote of a rank also contains its step, even if the rank does not report steps.
        step = max(last_step or 0, self._last_save_step) + self._lead_steps
        self._lead_steps *= 2
        return {"kind": "propose", "proposal": self._proposal, "step": step}

    def voted(self, rank: int, message: dict[str, Any]) -> dict[str, Any] | None:
        """Record a vote; return the decision to send once all ranks have voted, else None."""
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
        """Record that a rank has saved and ends; return True if all ranks have done so."""
        self._left.add(rank)
        return self._left >= self._ranks


class Stopping:
    """Handle the requests to stop one run, and the stop itself."""

    def __init__(
        self,
        asked: Path,
        nodes: Nodes,
        recorder: Recorder,
        tell: Callable[[policy.Event], None],
        observe: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        """Store the collaborators; there is no stop request yet.

        Args:
            asked: the file to which each call of `holdfast runs stop` adds a byte.
            nodes: the nodes of the run.
            recorder: the recorder of the run.
            tell: a function that passes an event to the policy.
            observe: a function that receives the events of the run.
        """
        self._asked = asked
        self._nodes = nodes
        self._recorder = recorder
        self._pass_on = tell
        self._observe = observe
        self._count = 0
        """How many times a stop was requested. Requests from several nodes at the same time count
        once.
        """
        self._has_begun = False
        self._waiting: tuple[str, str, int] | None = None
        """The last request that arrived before the run began."""
        self._vote: StopVote | None = None

    def begin(self) -> None:
        """Begin to accept stop requests, since the run has begun."""
        self._has_begun = True
        if self._waiting is not None:
            self.ask(*self._waiting)

    def ask(self, by: str, where: str, count: int) -> None:
        """Save the state and stop; at a repeated request from the same place, stop at once.

        Places are distinguished because a scheduler sends SIGTERM on every node, and each node
        forwards it.

        Args:
            by: the sender of the request.
            where: the place of the request: the id of a node, or another name.
            count: the number of requests from that place so far.
        """
        if not self._has_begun:
            if self._waiting is None or count >= self._waiting[2]:
                self._waiting = by, where, count
            return
        while self._count < count:
            self._count += 1
            self._pass_on(policy.StopRequested(by))
            self._recorder.event("stop_asked", {"by": by, "where": where})
            self._observe("stopping", {"by": by})

    def look(self) -> None:
        """Check if `holdfast runs stop` has been called."""
        try:
            count = self._asked.stat().st_size
        except OSError:
            return
        self.ask("holdfast runs stop", "the run's folder", count)

    def restart(self) -> None:
        """Record the start of a new attempt, whose ranks have not been ordered to stop yet."""
        self._vote = None

    def ask_ranks(self, view: AttemptView) -> None:
        """Have all ranks save their state at the same step, and end."""
        living = view.attached - {end.rank for end in view.exits}
        if not living or len(living) < (view.world_size or 1):
            self._pass_on(policy.CannotSave())
            return
        # No rank must confuse this vote with a vote that an earlier supervisor opened.
        first = self._nodes.generation * VOTES
        self._vote = StopVote(frozenset(living), view.detector.median_step_s, first=first)
        self._nodes.send(self._vote.propose(view.last_step), to="rank")

    def received(
        self,
        peer: Peer,
        message: dict[str, Any],
        view: AttemptView,
        *,
        is_present: Callable[[], bool],
    ) -> None:
        """Handle a rank's vote, its end, or its report of a SIGTERM.

        Args:
            peer: the rank that sent the message.
            message: a message of the kind `vote`, `stopped` or `sigterm`.
            view: the view of the present attempt.
            is_present: a function that returns True if the peer still takes part in the present
                attempt.
        """
        match message["kind"]:
            case "sigterm":
                self._hold_sigterm(peer, is_present)
            case "vote" if self._vote is not None:
                self._voted(self._vote, peer.rank, message, view)
            case "stopped" if self._vote is not None and self._vote.left(peer.rank):
                self._pass_on(policy.StateSaved())

    def _voted(self, vote: StopVote, rank: int, message: dict[str, Any], view: AttemptView) -> None:
        decision = vote.voted(rank, message)
        if decision is None:
            return
        self._nodes.send(decision, to="rank")
        if not vote.can_save:
            self._pass_on(policy.CannotSave())
        elif not decision["commit"]:
            self._nodes.send(vote.propose(view.last_step), to="rank")

    def _hold_sigterm(self, peer: Peer, is_present: Callable[[], bool]) -> None:
        """Have a rank end by its SIGTERM, if no stop of the run is requested shortly afterwards.

        If a scheduler has sent the signal, this process receives it, too, since a scheduler sends
        SIGTERM to every process of a job. In this case, the ranks save their state first.
        """

        def release() -> None:
            if is_present() and self._count == 0:
                self._nodes.send({"kind": "terminate"}, only=peer)

        asyncio.get_running_loop().call_later(SIGTERM_HOLD_S, release)
