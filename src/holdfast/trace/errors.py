"""Define the errors for unreadable traces, and for analyses without their input."""

from pathlib import Path

from holdfast.core.errors import BadUse


class BadTrace(BadUse):
    """Report a source that cannot be read, with the place, the problem and the next step."""

    def __init__(
        self,
        path: Path | str,
        problem: str,
        *,
        line: int | None = None,
        column: str | None = None,
        next_step: str,
    ) -> None:
        place = str(path)
        if line is not None:
            place += f", line {line}"
        if column is not None:
            place += f", column {column!r}"
        super().__init__(f"{place}: {problem} {next_step}")
        self.path, self.line, self.column = Path(path), line, column


class LeftOut(Exception):
    """Report that a trace lacks the input of an analysis; the report shows the message."""
