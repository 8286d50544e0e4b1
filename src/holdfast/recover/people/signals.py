"""List the signals that the supervisor could read at a failure, and the others with reasons."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # see `decisions`
    from holdfast.recover.attempt import AttemptView

NAMED = 8
"""Up to this number of ranks are listed; if there are more, only their number is given."""


def signals_of(
    view: "AttemptView", *, healthy_after: int, nodes: Mapping[str, list[str]] | None = None
) -> dict[str, list[str]]:
    """Return the signals that were read (`looked_at`) and the others (`not_seen`), as phrases.

    Args:
        view: the view of the failed attempt.
        healthy_after: the value of `RunSpec.healthy_after`; 0 if losses are not watched.
        nodes: the sources of the nodes' signals that were read, and the others.
    """
    ranks = set(range(view.world_size or 0))
    living = set(view.detector.living)
    seen = _Signals()
    seen.add(
        "the ends of",
        view.shims or view.attached,
        missing=view.without_a_shim,
        why="no shim has reported",
    )
    seen.add("the steps of", view.watched, missing=ranks - view.watched, why="no holdfast.attach()")
    if healthy_after == 0:
        seen.not_seen.append("losses: --healthy-after is 0")
    elif view.loss_leader is None:
        seen.not_seen.append("losses: no rank reports any")
    else:
        seen.looked_at.append(f"the losses, spikes those of rank {view.loss_leader}")
    hidden = {rank for rank in living if view.states.get(rank) == "hidden"}
    if living:  # agents report a state only if it is neither running nor sleeping
        seen.add("the process states of", living - hidden, missing=hidden, why="it may not be read")
    if view.frozen is None and view.left is None:
        seen.not_seen.append("stacks and CPU time: the job had failed before they were due")
    else:
        used = view.detector.measured
        seen.add("the CPU time of", used, missing=living - used, why="it cannot be read")
        stands = set(view.detector.stands)
        seen.add("the stacks of", stands, missing=living - stands, why="the nodes do not answer")
    seen.looked_at.append("the connections of the nodes")
    nodes = nodes or {}
    return {
        "looked_at": [*seen.looked_at, *nodes.get("looked_at", ())],
        "not_seen": [*seen.not_seen, *nodes.get("not_seen", ())],
    }


class _Signals:
    def __init__(self) -> None:
        self.looked_at: list[str] = []
        self.not_seen: list[str] = []

    def add(self, what: str, ranks: Collection[int], *, missing: Collection[int], why: str) -> None:
        if ranks:
            self.looked_at.append(f"{what} {_named(ranks, is_all=not missing)}")
        if missing or not ranks:
            self.not_seen.append(f"{what} {_named(missing, is_all=not ranks)}: {why}")


def _named(ranks: Collection[int], *, is_all: bool) -> str:
    if is_all:
        return "all ranks"
    if len(ranks) > NAMED:
        return f"{len(ranks)} ranks"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, sorted(ranks)))}"
