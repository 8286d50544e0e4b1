"""Describe each event of a supervised run in a line, for `holdfast run` and the demonstration."""

from collections.abc import Mapping
from typing import Any

from holdfast.core.left_out import in_words

DETECTED = {"hang": "the job stands still", "anomaly": "the loss is broken"}
"""What was detected, by the kind of the incident."""


def narrate(kind: str, data: Mapping[str, Any]) -> str | None:
    """Return the line that describes an event of the `Observer`; None if the event has no line."""
    match kind:
        case "restored":
            over = "".join(
                f"; passed over step {one['step']}: {one['reason']}" for one in data["passed_over"]
            )
            return f"restored step {data['step']} from {data['path']}{over}"
        case "incident":
            rank = "" if data["rank"] is None else f", rank {data['rank']}"
            return f"detected: {DETECTED.get(data['kind'], 'the job failed')}{rank}"
        case "resolved" if data["action"] == "restart":  # the outcome reports a stop
            return f"incident {data['incident_id']}: {data['summary']} {data['explanation']}"
        case "resumed":
            return f"training again at step {data['step']}, {data['seconds_to_restart']:.1f} s after detection"
        case "proposal":
            return f"{data['text']} Approve it by: holdfast runs approve {data['run']}"
        case "stopping":
            return f"{data['by']}: saving state, then stopping (once more: stop now)"
        case "save_failed":
            return f"training goes on after a failed save: {data['reason']}"
        case "disk_full":
            return f"{data['folder']} is full: {data['deleted']} was deleted to make room"
        case "batches_skipped":
            first, last = data["first"], data["last"]
            were = "was" if first == last else "were"
            return f"{in_words(first, last).capitalize()} {were} left out of the training"
        case "fault_injected":
            return f"step {data['step']}: {data['detail']}"
        case "trouble" | "nodes" | "observed" | "anomaly_class":
            return str(data["text"])
        case "ended":
            return str(data["outcome"])
    return None
