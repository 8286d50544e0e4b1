"""What can be wrong with a trace, and what an analysis cannot do with it."""

from pathlib import Path

from holdfast.core.errors import BadUse


class BadTrace(BadUse):
    """A source cannot be read; says where it is, what was expected there and what to do next."""

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
    """An analysis needs what this trace does not have; its message is the sentence that the report shows."""
