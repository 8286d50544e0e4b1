"""Read what each attempt of a run has reported: its start step, and the numbers of each step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.ledger import Attempt
from holdfast.core.telemetry import StepRecord, read_steps
from holdfast.core.whole import whole_number
from holdfast.recover.detectors.anomaly import Anomaly

GRAD_NORM = "grad_norm"
JOURNAL_BYTES = 16 * 2**20
"""The number of bytes at the end of the journal that are read, which hold some hundred thousand
steps.
"""
KINDS = ("begun", "restored", "leave_out", "launched", "ending")
"""The kinds of the events from which traces are made."""

Numbers = tuple[float, ...]
"""The loss of a step, and the norm of the gradient if the script reports it."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The reports of one attempt."""

    attempt: int
    numbers: Mapping[int, Numbers]
    """The numbers of each step, by the number of steps completed, in order."""
    restored_step: int | None = None
    """The step of the checkpoint file that the attempt began from; None without a file."""
    anomaly: Anomaly | None = None
    """The broken loss that ended the attempt, if one did."""
    left_out: frozenset[tuple[int, int]] = frozenset()
    """The ranges of batches that were left out. Attempts with different ranges train on different
    data.
    """
    nodes: tuple[str, ...] = field(default=())
    """The names of the nodes, in the order of their ranks."""

    @property
    def start_step(self) -> int:
        """The number of steps completed in the state from which the attempt began."""
        return self.restored_step or 0


def traces_of(
    attempts: Iterable[Attempt],
    events: Iterable[tuple[str, int, dict[str, Any]]],
    steps: Iterable[StepRecord],
) -> list[Trace]:
    """Return the traces of all attempts since a person last started the run, in order.

    Args:
        attempts: the attempts of the run.
        events: the kind, attempt and data of the run's events with the kinds `KINDS`, in order.
        steps: the steps of the journal.

    Raises:
        KeyError, TypeError, ValueError: an event is malformed.
    """
    begun = 0
    restored: dict[int, int | None] = {}
    skips: dict[int, tuple[int, int]] = {}
    nodes: dict[int, tuple[str, ...]] = {}
    broken: dict[int, Anomaly] = {}
    for kind, attempt, data in events:
        match kind:
            case "begun":
                begun = attempt
            case "restored":
                restored.setdefault(attempt, whole_number(data.get("step")))
            case "leave_out":
                skips[attempt] = (data.get("first", 0), data.get("last", 0))
            case "launched":
                nodes[attempt] = tuple(map(str, dict(data.get("nodes") or {}).values()))
            case "ending" if data.get("anomaly") is not None:
                broken[attempt] = Anomaly.of_json(data["anomaly"])
    numbers: dict[int, dict[int, Numbers]] = {}
    for record in steps:
        if record.loss is not None:
            norm = record.metrics.get(GRAD_NORM)
            both = (record.loss,) if norm is None else (record.loss, norm)
            numbers.setdefault(record.attempt, {})[record.step] = both
    found = []
    for one in attempts:
        if one.number <= begun:
            continue
        has_file = restored.get(one.number) is not None
        launches = [attempt for attempt in nodes if attempt <= one.number]
        found.append(
            Trace(
                attempt=one.number,
                numbers=numbers.get(one.number, {}),
                restored_step=one.start_step if has_file else None,
                anomaly=broken.get(one.number),
                left_out=frozenset(each for attempt, each in skips.items() if attempt < one.number),
                nodes=nodes[max(launches)] if launches else (),
            )
        )
    return found


def steps_of(journal: Path) -> list[StepRecord]:
    """Return the last steps of a journal.

    Raises:
        HoldfastError: the journal is damaged.
        OSError: the journal cannot be read.
    """
    return list(read_steps(journal, last_bytes=JOURNAL_BYTES))
