"""Describe in a sentence the cause of a slow training, or the data that it leaves out."""

from collections.abc import Mapping
from typing import Any

from holdfast.core.ledger.records import Event
from holdfast.core.left_out import in_words


def training_note(event: Event) -> str | None:
    """Return an event about the training as a sentence; None for another or a malformed event."""
    data = event.data
    match event.kind:
        case "leave_out":
            left_out = in_words(data.get("first"), data.get("last"))
            return f"Left out {left_out} of the data in all later attempts."
        case "slow_ranks":
            return _slow_ranks(data)
        case "step_time":
            return _step_time(data)
    return None


def _slow_ranks(data: Mapping[str, Any]) -> str | None:
    shares = data.get("shares")
    if not isinstance(shares, Mapping) or any(not _is_number(one) for one in shares.values()):
        return None
    if not shares:
        return "No rank was slow any more."
    ranks, node = " and ".join(map(str, shares)), data.get("node")
    where = "" if node is None else f" on node {node}"
    named, they = ("Rank", "it") if len(shares) == 1 else ("Ranks", "them")
    was = "was" if len(shares) == 1 else "were"
    share = max(shares.values())
    return f"{named} {ranks}{where} {was} slow: the others waited for {they} for {share:.0%} of the time."


def _step_time(data: Mapping[str, Any]) -> str | None:
    step_s, before_s = data.get("step_s"), data.get("before_s")
    if not _is_number(step_s) or not _is_number(before_s):
        return None
    if data.get("is_over"):
        return f"A step took {step_s:.3g} s again."
    return f"A step took {step_s:.3g} s; it had taken {before_s:.3g} s before."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
