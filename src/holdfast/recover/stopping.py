"""Stop a run with its state saved: requests, the ranks' vote, and ranks with a SIGTERM."""

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
"""The longest time between a rank's SIGTERM and the supervisor's own."""
LEAD_S = 0.5
"""The lead of the first proposal over the ranks' steps, so that it reaches all ranks in time."""
VOTES = 1_000_000
"""More proposals than one supervisor makes."""


class StopVote:
    """The search for a step at which every rank can stop.

    `attach._StopAgreement` is the ranks' side.
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
        """False once every rank said that it never called `save`."""
        self._saves: dict[int, bool] = {}
        self._last_save_step = 0

    def propose(self, last_step: int | None) -> dict[str, Any]:
        """Return the message that opens a vote; each further proposal is twice as far ahead."""
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
        """Record that a rank has saved and ends; return True once all ranks have."""
        self._left.add(rank)
        return self._left >= self._ranks


class Stopping:
    """The stop of one run, after a request."""

    def __init__(
        self,
        asked: Path,
        nodes: Nodes,
        recorder: Recorder,
        tell: Callable[[policy.Event], None],
        observe: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        """Start without a request.

        Args:
            asked: the file to which each call of `holdfast runs stop` adds a byte.
            nodes: the nodes of the run.
            recorder: the recorder of the run.
            tell: passes an event to the policy.
            observe: passes on each event of the run.
        """
        self._asked = asked
        self._nodes = nodes
        self._recorder = recorder
        self._pass_on = tell
        self._observe = observe
        self._count = 0
        """How often the run was asked to stop; several nodes that ask together count once."""
        self._has_begun = False
        self._waiting: tuple[str, str, int] | None = None
        """The last call of `ask` before the run has begun."""
        self._vote: StopVote | None = None

    def begin(self) -> None:
        """Record that the run goes on: stop requests are accepted from now on."""
        self._has_begun = True
        if self._waiting is not None:
            self.ask(*self._waiting)

    def ask(self, by: str, where: str, count: int) -> None:
        """Save state and stop; at a repeated request from one place, stop at once.

        A scheduler sends SIGTERM on every node, and each node passes that on.

        Args:
            by: the sender of the request.
            where: the place of the request: a node's id, or another name.
            count: the number of requests from that place so far.
        """
        if not self._has_begun:
            if self._waiting is None or count >= self._waiting[2]:
                self._waiting = by, where, count
            return
        while self._count < count:
            self._count += 1
            self._pass_on(policy.StopAsked(by))
            self._recorder.event("stop_asked", {"by": by, "where": where})
            self._observe("stopping", {"by": by})

    def look(self) -> None:
        """See whether `holdfast runs stop` has been called."""
        try:
            count = self._asked.stat().st_size
        except OSError:
            return
        self.ask("holdfast runs stop", "the run's folder", count)

    def restart(self) -> None:
        """Record the begin of a new attempt, for which there is no request yet."""
        self._vote = None

    def ask_ranks(self, view: AttemptView) -> None:
        """Have all ranks save at the same step and leave."""
        living = view.attached - {end.rank for end in view.exits}
        if not living or len(living) < (view.world_size or 1):
            self._pass_on(policy.CannotSave())
            return
        # No rank may take a vote for one that an earlier supervisor has opened.
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
            peer: the rank.
            message: a message of the kind vote, stopped or sigterm.
            view: the present attempt.
            is_present: whether the peer still takes part in the present attempt.
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
        """Have a rank act on its SIGTERM if no stop of the run is requested within a while.

        A scheduler sends SIGTERM to every process of a job, so this process receives the signal,
        too, and has the ranks save their state first.
        """

        def release() -> None:
            if is_present() and self._count == 0:
                self._nodes.send({"kind": "terminate"}, only=peer)

        asyncio.get_running_loop().call_later(SIGTERM_HOLD_S, release)
