"""Describe a slow training, a broken loss, or data left out of the training, in a sentence."""

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.core.ledger.records import Event
from holdfast.core.left_out import in_words

CLASSES: Mapping[str, str] = {
    "data_or_model": "Cause: the data or the model.",
    "hardware": "Cause: the hardware.",
    "checkpoint": "Cause: a damaged checkpoint.",
    "cannot_tell": "Cause: the replay cannot tell.",
}
"""The class of a broken loss, as a sentence."""


def class_note(events: Iterable[Event], attempt: int) -> list[str]:
    """Return the class of the broken loss that ended an attempt, together with the evidence.

    The list is empty if no event records a class for the attempt.

    Args:
        events: the events of the run.
        attempt: the number of the attempt.
    """
    for event in events:
        attempts, kind = event.data.get("attempts"), str(event.data.get("class"))
        if event.kind == "anomaly_class" and isinstance(attempts, list) and attempt in attempts:
            return [f"{CLASSES.get(kind, kind)} {event.data.get('evidence')}"]
    return []


def training_note(event: Event) -> str | None:
    """Return an event about the training as a sentence.

    The result is None for an event about something else, and for a malformed event.
    """
    data = event.data
    match event.kind:
        case "leave_out":
            left_out = in_words(data.get("first"), data.get("last"))
            return f"Left out {left_out} of the data in all later attempts."
        case "rollback_missed":
            return str(data.get("text"))
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
