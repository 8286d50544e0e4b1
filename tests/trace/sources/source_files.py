"""Provide files for the adapters' tests.

Published files are read beside the repository and never copied.
"""

import csv
from pathlib import Path
from typing import Any

import pytest
from normalised_rows import database

from holdfast.trace.schema import JOB_COLUMNS
from holdfast.trace.sources.reading import Reading, Source

DATA = Path(__file__).parents[3] / "../shared/data"


def published(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"published data {name} are not here")
    return path


def sample_rows(trace: str, folder: Path) -> Path:
    """Return rows of a released file without the index that precedes them in the fixture."""
    with published(f"acme_sample_rows/{trace}_rows.csv").open(newline="") as file:
        rows = [row[1:] for row in csv.reader(file)]
    path = folder / f"trace_{trace}.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def dicts(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_in_order(source: Source, path: Path) -> tuple[Reading, list[dict[str, Any]]]:
    """Read a file with an adapter: return the reading, and the rows of its table in the file's
    order.
    """
    with database() as connection:
        reading = source.read(connection, path, "jobs_0")
        kinds = {row[0]: row[1] for row in connection.execute("DESCRIBE jobs_0").fetchall()}
        assert set(kinds) == reading.columns
        assert kinds == {name: JOB_COLUMNS[name] for name in kinds}
        return reading, [
            dict(zip(kinds, row, strict=True))
            for row in connection.execute("FROM jobs_0").fetchall()
        ]
