"""Plan the faults of the demonstration from a seed, and inject real faults at the planned steps."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import psutil

from holdfast.core.errors import BadUse
from holdfast.testing import Injector
from holdfast.testing import injector as public

Kind = Literal["Rank killed", "Checkpoint damaged", "Rank frozen", "Loss became NaN", "Bad node"]
"""The name of a fault in the terminal and on the page."""
KINDS: Final[tuple[Kind, ...]] = (
    "Rank killed",
    "Checkpoint damaged",
    "Rank frozen",
    "Loss became NaN",
    "Bad node",
)
INJECTED: Final[Mapping[Kind, public.Kind]] = {
    "Rank killed": "rank killed",
    "Rank frozen": "rank frozen",
    "Checkpoint damaged": "damaged checkpoint",
}
"""The faults that `holdfast.testing.Injector` injects, with the injector's names for them."""
FIRST_INTERVAL: Final = 2
"""The first interval between saves that may contain a fault.

Before it, two checkpoints were saved, so that one remains if the newest is damaged.
"""
MARGIN_STEPS: Final = 4
"""The least number of steps from a save to a fault.

The save is then complete, so that the newest checkpoint is the one that the plan assumes.
"""


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One planned fault.

    Attributes:
        kind: the name of the fault.
        rank: the rank that the fault strikes.
        step: the fault is injected when this step is completed.
    """

    kind: Kind
    rank: int
    step: int


def plan_faults(seed: int, *, steps: int, save_every: int, world_size: int) -> list[PlannedFault]:
    """Return one fault of each kind, in random order, at increasing random steps.

    Raises:
        BadUse: there are too few steps for all faults.
    """
    source = random.Random(seed)
    kinds = list(KINDS)
    source.shuffle(kinds)
    # The last interval has no fault: on a busy host, a fault is injected some steps later.
    intervals = range(FIRST_INTERVAL, steps // save_every - 1)
    if len(intervals) < len(kinds):
        least = (FIRST_INTERVAL + len(kinds) + 1) * save_every
        raise BadUse(
            f"--steps {steps} leaves no room for {len(kinds)} faults: give at least {least}."
        )
    # No two faults are in the same interval between saves, so that the run has recovered from one
    # fault before the next.
    chosen = sorted(source.sample(intervals, len(kinds)))
    return [
        PlannedFault(
            kind=kind,
            # `train` damages the data of the last rank.
            rank=world_size - 1
            if kind in ("Loss became NaN", "Bad node")
            else source.randrange(world_size),
            step=interval * save_every + source.randrange(MARGIN_STEPS, save_every - MARGIN_STEPS),
        )
        for kind, interval in zip(kinds, chosen, strict=True)
    ]


class PlannedFaults:
    """Inject each planned fault once, when the training first reports the fault's step."""

    def __init__(
        self,
        plan: Sequence[PlannedFault],
        injector: Injector,
        *,
        break_link: Callable[[str], None],
    ) -> None:
        """Store the plan and the ways to inject the faults.

        Args:
            plan: the faults, in the order of their steps.
            injector: injects the faults of processes and checkpoints.
            break_link: breaks the network link of the node with the given name.
        """
        self._waiting = list(plan)
        self._injector = injector
        self._break_link = break_link

    def stepped(self, step: int, pids: Mapping[int, int]) -> dict[str, Any] | None:
        """Inject the next fault if its step is completed.

        Args:
            step: the completed step.
            pids: the process of each rank.

        Returns:
            The record of the injected fault; None if no fault was due.
        """
        if not self._waiting or step < self._waiting[0].step:
            return None
        fault = self._waiting[0]
        if fault.kind == "Loss became NaN":
            # The script damages the batch. The job may have ended before this report arrives.
            del self._waiting[0]
            what = "its weight is NaN, and so are all gradients"
            detail = f"batch {fault.step + 1} of rank {fault.rank} is damaged: {what}"
            return {
                "fault": fault.kind,
                "detail": detail,
                "rank": fault.rank,
                "node": None,
                "step": step,
            }
        try:
            pid = pids[fault.rank]
            node = psutil.Process(pid).environ().get("HOLDFAST_NODE_NAME", "this host")
        except (KeyError, psutil.Error):
            return None  # the rank is just being replaced: try again at the next step
        who = f"rank {fault.rank} on {node} (pid {pid})"
        if fault.kind in INJECTED:
            injected = self._injector.inject(INJECTED[fault.kind], rank=fault.rank)
            if injected.took_effect_at_s is None:
                return None  # the rank is just being replaced, as above
            who = f"rank {fault.rank} on {injected.node} (pid {injected.pid})"
            detail = {
                "Rank killed": f"{who} was killed with SIGKILL",
                "Rank frozen": f"{who} was frozen with SIGSTOP",
                "Checkpoint damaged": f"{injected.detail}, in the newest checkpoint; then {who} was killed, and its "
                "copy of the checkpoint in memory",
            }[fault.kind]
        else:
            detail = (
                f"the network card of {node} fails from now on: half of its collectives find their "
                "connections cut"
            )
            self._break_link(node)
        del self._waiting[0]
        return {
            "fault": fault.kind,
            "detail": detail,
            "rank": fault.rank,
            "node": node,
            "step": step,
        }
