"""Write and read the journal of steps, which has one JSON object in each line.

The journal is a file beside the ledger, because steps come too fast for a database.

A kill -9 of the writer loses no line that `append` has written. Only the last line can be
incomplete. Readers ignore an incomplete last line, and the next writer removes it. The journal is
not fsynced, so a power cut can lose the newest lines. That loses no training state, which is in the
checkpoints.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast.core.errors import HoldfastError

READ_BACK_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One training step, as reported by the lowest rank that reports steps."""

    attempt: int
    rank: int
    step: int
    """The number of completed steps."""
    at_s: float
    """The time at which the step was completed, in seconds since the Unix epoch."""
    step_s: float
    """Seconds since the same rank's previous step, without sections (save, restore, evaluate)."""
    loss: float | None = None
    """The loss; it may be NaN or infinite."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The script's other reported numbers, for example `val_loss`."""

    @classmethod
    def of_report(cls, attempt: int, rank: int, report: Mapping[str, Any], at_s: float) -> Self:
        """Create a record from a rank's report of a step.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the report is malformed.
        """
        return cls(
            attempt=attempt,
            rank=rank,
            step=int(report["step"]),
            at_s=at_s,
            step_s=float(report["step_s"]),
            loss=None if report["loss"] is None else float(report["loss"]),
            metrics={str(name): float(value) for name, value in report["metrics"].items()},
        )


_TAIL_BYTES = 256 * 1024
"""The number of bytes to read from the end to find the last record; no record is as long."""


class StepJournal:
    """Write the journal; the supervisor is its only writer.

    When `append` returns, the file holds the whole line.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the journal at `path`, and remove an incomplete last line.

        Raises:
            OSError: the file cannot be opened.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        whole_bytes = _whole_lines_bytes(self._fd)
        if whole_bytes < os.fstat(self._fd).st_size:
            os.ftruncate(self._fd, whole_bytes)

    def last(self) -> StepRecord | None:
        """Return the last record; None if there is no readable record."""
        size_bytes = os.fstat(self._fd).st_size
        tail = os.pread(self._fd, _TAIL_BYTES, max(0, size_bytes - _TAIL_BYTES))
        lines = tail.splitlines()
        try:
            return decode_step(lines[-1]) if lines else None
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def append(self, record: StepRecord) -> None:
        """Write one line.

        Raises:
            OSError: the line could not be written, for example because the disk is full; no part of
                the line is left in the file.
        """
        line = _encode(record)
        # One write for each line, so that readers see only complete lines, even after a kill -9. A
        # full disk is the exception.
        start_bytes = os.fstat(self._fd).st_size
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, start_bytes)
            raise

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_steps(path: Path, *, last_bytes: int | None = None) -> Iterator[StepRecord]:
    """Yield the steps of a journal in the order of writing; no steps if there is no file yet.

    A last line without a line end is incomplete, and is left out.

    Args:
        path: the journal.
        last_bytes: read only the complete lines within this many bytes at the end of the file;
            None: read the whole journal.

    Raises:
        HoldfastError: a complete line is not a step record; the message has the line's number,
            counted from the first line that was read.
    """
    try:
        journal = path.open("rb")
    except FileNotFoundError:
        return
    with journal:
        start_bytes = 0 if last_bytes is None else os.fstat(journal.fileno()).st_size - last_bytes
        if start_bytes > 0:
            journal.seek(start_bytes - 1)
            journal.readline()  # skip the rest of the previous line, or its newline
        for number, line in enumerate(journal, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = decode_step(line)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise HoldfastError(
                    f"{path}:{number} is not a step record ({error!r}). Something other "
                    "than Holdfast changed it, or its disk is failing; delete that line to read the rest."
                ) from error
            yield record


def _encode(record: StepRecord) -> bytes:
    fields = {
        "attempt": record.attempt,
        "rank": record.rank,
        "step": record.step,
        "at_s": _to_json(record.at_s),
        "step_s": _to_json(record.step_s),
        "loss": None if record.loss is None else _to_json(record.loss),
        "metrics": {name: _to_json(value) for name, value in record.metrics.items()},
    }
    # allow_nan=False: JSON has no NaN (RFC 8259, section 6), so `_to_json` writes NaN as a string.
    return json.dumps(fields, separators=(", ", ": "), allow_nan=False).encode() + b"\n"


def decode_step(line: bytes) -> StepRecord:
    """Parse one line of the journal.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the line is not a step record.
    """
    fields = json.loads(line)
    loss = fields["loss"]
    return StepRecord(
        attempt=int(fields["attempt"]),
        rank=int(fields["rank"]),
        step=int(fields["step"]),
        at_s=_number(fields["at_s"]),
        step_s=_number(fields["step_s"]),
        loss=None if loss is None else _number(loss),
        metrics={str(name): _number(value) for name, value in fields["metrics"].items()},
    )


def _to_json(value: float) -> float | str:
    # "nan", "inf" and "-inf" are the words that float() reads.
    return value if math.isfinite(value) else str(float(value))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{value!r} is not a number")
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def _whole_lines_bytes(fd: int) -> int:
    """Return the file offset at which the last complete line ends."""
    end_bytes = os.fstat(fd).st_size
    while end_bytes > 0:
        start_bytes = max(0, end_bytes - READ_BACK_BYTES)
        newline = os.pread(fd, end_bytes - start_bytes, start_bytes).rfind(b"\n")
        if newline >= 0:
            return start_bytes + newline + 1
        end_bytes = start_bytes
    return 0
