"""Define a small table with named columns: the result of every query and every analysis."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

Column = npt.NDArray[Any]


@dataclass(frozen=True)
class Table:
    """Hold columns of equal length, in order; their names carry units (`duration_s`, `gpu_time_h`).

    A missing number is NaN, a missing text is None, and a missing time is NaT.
    """

    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        lengths = {len(column) for column in self.columns.values()}
        assert len(lengths) <= 1, f"columns of different lengths: {lengths}"

    @classmethod
    def of_rows(cls, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> "Table":
        """Build a table from rows.

        A column that contains text gets the dtype `object`; for others, NumPy chooses the dtype.
        """
        columns = {}
        for number, name in enumerate(names):
            cells = [row[number] for row in rows]
            text = any(isinstance(cell, str) for cell in cells)
            columns[name] = np.array(cells, dtype=object if text else None)
        return cls(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Iterate over the rows as Python values."""
        return zip(*(column.tolist() for column in self.columns.values()), strict=True)

    def where(self, **equal: object) -> "Table":
        """Return a table of the rows in which the named columns equal the given values."""
        keep = np.ones(len(self), dtype=bool)
        for name, value in equal.items():
            keep &= self[name] == value
        return Table({name: column[keep] for name, column in self.columns.items()})

    def csv(self) -> str:
        """Return the table as CSV text with a header.

        A missing value is an empty field. Times are in ISO 8601, UTC.
        """
        target = io.StringIO()
        writer = csv.writer(target, lineterminator="\n")
        writer.writerow(self.columns)
        for row in self.rows():
            writer.writerow([_field(value) for value in row])
        return target.getvalue()

    def df(self) -> "pd.DataFrame":
        """Return the table as a pandas DataFrame; this needs pandas."""
        import pandas as pd

        return pd.DataFrame(dict(self.columns))

    def arrow(self) -> "pa.Table":
        """Return the table as a pyarrow Table; this needs pyarrow."""
        import pyarrow as pa

        return pa.table(
            {name: pa.array(column, from_pandas=True) for name, column in self.columns.items()}
        )


def _field(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()  # a list in a cell
    if value is None or value != value:  # noqa: PLR0124 - NaN and NaT differ from themselves
        return ""
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, datetime):
        return f"{value.isoformat()}Z"
    return value
