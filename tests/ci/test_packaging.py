"""The package as pip installs it: what each extra has suffices for what it is said to be for."""

import importlib.metadata
import subprocess
import sys

import pytest
from packaging.utils import canonicalize_name

from holdfast.cli.main import COMMANDS
from required import required_distributions

MODULES = {
    "": [
        "holdfast.recover.agent.agent",
        "holdfast.recover.supervisor_process",
        "holdfast.recover.launching.guard",
        "holdfast.recover.people.sender",
        "holdfast.recover.localise.solo",
        "holdfast.recover.signals.gpu.reader",
        "holdfast.recover.shim.trainer",
        "holdfast.recover.shim.rank_shim",
        "holdfast.profile.sampler",
        "holdfast.profile.sources.reader",
        "holdfast.cluster.slurm_task",
        *(module for name, (module, _) in COMMANDS.items()),
    ],
    "train,report": [
        "holdfast.demo",
        "holdfast.demo.nodes",
        "holdfast.demo.train",
        "holdfast.checkpoint.writer.process",
    ],
}
"""What an extra must suffice for: the commands, and the processes that `holdfast run` and the demo start."""
IMPORT_ALL = """
import importlib, sys

allowed = set(sys.argv[2].split(","))

class Absent:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in allowed | sys.stdlib_module_names or top.startswith("_sysconfigdata"):
            return None
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for module in sys.argv[1].split(","):
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        print(module, "imports", error.name)
"""


def modules_of(*extras):
    """Return the top-level modules of all that `holdfast[extras]` installs."""
    names = {"holdfast", *required_distributions(*extras)}
    return {
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if names & {canonicalize_name(one) for one in distributions}
    }


@pytest.mark.parametrize("extras", MODULES)
def test_what_is_installed_suffices_for_what_is_started(extras):
    allowed = {"holdfast", *modules_of(*extras.split(","))}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, ",".join(MODULES[extras]), ",".join(allowed)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stdout
