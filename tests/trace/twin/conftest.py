"""The twins that several tests look at, drawn once."""

import csv
from pathlib import Path

import pytest

from holdfast.trace.twin import calibration, draw

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"


@pytest.fixture(scope="session")
def published():
    """Reads a published CSV as dicts; skips where the files are absent."""

    def read(name):
        path = DATA / name
        if not path.exists():
            pytest.skip(f"the published figures are not here: {path}")
        with path.open() as file:
            return list(csv.DictReader(file))

    return read


@pytest.fixture(scope="session")
def kalos():
    return draw(calibration("kalos"))


@pytest.fixture(scope="session")
def seren():
    return draw(calibration("seren"))
