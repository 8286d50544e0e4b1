"""What befalls the demonstration's job: planned from the seed, injected for real when the job gets there."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from holdfast.checkpoint import scan
from holdfast.testing import faults

Kind = Literal["SIGKILL", "SIGSTOP", "damaged checkpoint"]

MARGIN_STEPS = 4
"""Faults keep this far from a save on either side, so that the newest checkpoint is the one that was planned."""


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One fault: what, on which rank, once the job has completed which step."""

    kind: Kind
    rank: int
    step: int


def plan_faults(seed: int, *, steps: int, save_every: int, world_size: int) -> list[PlannedFault]:
    """One fault of each kind, at random steps, in random order, in the order they strike.

    Two checkpoints lie before the first, so that there is one to fall back to when the newest is damaged.
    """
    source = random.Random(seed)
    kinds: list[Kind] = ["SIGKILL", "SIGSTOP", "damaged checkpoint"]
    source.shuffle(kinds)
    intervals = range(2, steps // save_every)
    if len(intervals) < len(kinds):
        raise ValueError(
            f"{steps} steps with a checkpoint every {save_every} leave no room for {len(kinds)} faults"
        )
    # A different interval between saves for each, so that every fault is recovered from before the next.
    chosen = sorted(source.sample(intervals, len(kinds)))
    return [
        PlannedFault(
            kind=kind,
            rank=source.randrange(world_size),
            step=interval * save_every + source.randrange(MARGIN_STEPS, save_every - MARGIN_STEPS),
        )
        for kind, interval in zip(kinds, chosen, strict=True)
    ]


class Injector:
    """Injects each planned fault once, when the job first reports its step."""

    def __init__(self, plan: Sequence[PlannedFault], checkpoints: Path, seed: int) -> None:
        self._waiting = list(plan)
        self._checkpoints = checkpoints
        self._source = random.Random(seed)

    def stepped(self, step: int, pids: Mapping[int, int]) -> dict[str, Any] | None:
        """Told that the job completed `step`; returns what was done, for the record, if anything was."""
        if not self._waiting or step < self._waiting[0].step:
            return None
        fault = self._waiting.pop(0)
        pid = pids[fault.rank]
        who = f"rank {fault.rank} (pid {pid})"
        match fault.kind:
            case "SIGKILL":
                detail = f"{who} was killed with SIGKILL"
                faults.kill(pid)
            case "SIGSTOP":
                detail = f"{who} was frozen with SIGSTOP"
                faults.freeze(pid)
            case "damaged checkpoint":
                detail = f"{self._damage_newest()}, then {who} was killed with SIGKILL, and what keeps its memory"
                for child in psutil.Process(pid).children():  # the checkpoint is whole there
                    faults.kill(child.pid)
                faults.kill(pid)
        return {"fault": fault.kind, "detail": detail, "rank": fault.rank, "step": step}

    def _damage_newest(self) -> str:
        newest = max(scan(self._checkpoints), key=lambda found: found.step)
        data = sorted(newest.path.glob("*.distcp"))
        path = self._source.choice(data)
        offset, bit = faults.flip_bit(path, self._source)
        return f"bit {bit} of byte {offset} of {newest.path.name}/{path.name} was flipped"
