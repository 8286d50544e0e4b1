"""Find nodes that are about to be taken away, according to notices.

Notices come from schedulers, clouds and administrators.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.recover.signals.facts import Notice


@dataclass(frozen=True, kw_only=True)
class LeavingNode:
    """A node that is about to be taken away."""

    culprit: str
    kind: str
    """The kind of the notice with the earliest time (see `signals.facts.NoticeKind`)."""
    left_s: float | None
    """The seconds until the node is taken away; None if unknown."""
    evidence: tuple[str, ...]
    source: str


def look(notices: Mapping[str, Sequence[Notice]], now_s: float) -> tuple[LeavingNode, ...]:
    """Return the nodes that have notices, by name.

    Args:
        notices: for each node, the notices that hold now.
        now_s: the present time, in Unix seconds.
    """
    found = []
    for name in sorted(notices):
        ordered = sorted(
            notices[name],
            key=lambda one: (one.until_s is None, one.until_s or 0.0, one.kind, one.source),
        )
        if not ordered:
            continue
        first = ordered[0]
        found.append(
            LeavingNode(
                culprit=name,
                kind=first.kind,
                left_s=None if first.until_s is None else first.until_s - now_s,
                evidence=tuple(f"{one.source}: {one.text}" for one in ordered),
                source=first.source,
            )
        )
    return tuple(found)
