"""The tests of the console use the sample runs of the run report."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent))


@pytest.fixture(scope="session")
def demo_home(tmp_path_factory):
    """A home with the run `demo-1`, written once; tests copy it."""
    import sample_runs

    home = tmp_path_factory.mktemp("demo")
    with sample_runs.open_home(home) as ledger:
        sample_runs.faulty_run(ledger, home)
    return home


@pytest.fixture
def home(demo_home, tmp_path):
    """A test's own home with the run `demo-1`."""
    return Path(shutil.copytree(demo_home, tmp_path / "home"))
