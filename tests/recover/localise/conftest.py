"""Let tests of nodes take as long as a full machine needs."""

from pathlib import Path

import pytest

PATIENCE = """
import importlib.util, sys

LIMITS_S = {
    "holdfast.recover.localise.group": {"CONNECT_S": 300.0, "LIMIT_S": 600.0},
    "holdfast.recover.localise.session": {},
    "holdfast.recover.localise.solo": {"LIMIT_S": 300.0},
    "holdfast.recover.localise.tester": {"START_S": 300.0},
}

class Patience:
    def find_spec(self, name, path=None, target=None):
        limits_s = LIMITS_S.pop(name, None)
        if limits_s is None:
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def execute_and_set(module):
            execute(module)
            assert limits_s.keys() <= vars(module).keys()
            vars(module).update(limits_s)
            if name == "holdfast.recover.localise.session":
                module.localise.__kwdefaults__["limit_s"] = 1800.0
        spec.loader.exec_module = execute_and_set
        return spec

sys.meta_path.insert(0, Patience())
"""
"""A module that Python imports at its start: it sets limits of time that a healthy node would miss
on a full machine."""
STARTUP = Path(__file__).parents[2] / "startup" / "sitecustomize.py"


@pytest.fixture
def startup(tmp_path_factory):
    """A function that returns a folder for PYTHONPATH, with what each process does at its start."""

    def folder_of(text=""):
        folder = tmp_path_factory.mktemp("startup")
        (folder / "sitecustomize.py").write_text(text + PATIENCE + STARTUP.read_text())
        return folder

    return folder_of
