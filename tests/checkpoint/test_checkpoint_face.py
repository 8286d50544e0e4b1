import subprocess
import sys

import pytest

import holdfast.checkpoint
from holdfast.checkpoint.convert.safetensors import main as convert

NEEDS_TORCH = {
    "CheckpointComparison",
    "CheckpointInventory",
    "Batches",
    "Checkpointer",
    "EntryDifference",
    "OpenedCheckpoint",
    "PlainDcpInfo",
    "check_metadata_against_files",
    "compare_checkpoints",
    "consolidate_checkpoint",
    "export_safetensors",
    "import_dcp",
    "is_plain_dcp",
    "open_for_reading",
    "read_dcp_metadata",
    "settle_conversion",
    "take_inventory",
    "verify_plain_dcp",
}


@pytest.mark.parametrize("name", holdfast.checkpoint.__all__)
def test_every_name_is_there(name):
    assert getattr(holdfast.checkpoint, name) is not None


def test_other_names_are_not():
    with pytest.raises(AttributeError, match=r"'holdfast\.checkpoint' has no attribute 'nothing'"):
        holdfast.checkpoint.nothing  # noqa: B018


def test_what_needs_no_torch_imports_none():
    light = sorted(set(holdfast.checkpoint.__all__) - NEEDS_TORCH)
    code = (
        "import sys, holdfast.checkpoint as face\n"
        "assert not any(name.startswith('holdfast.checkpoint.') for name in sys.modules)\n"
        f"for name in {light}:\n"
        "    getattr(face, name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_of_a_conversion_runs_it(tmp_path):
    command = holdfast.checkpoint.conversion_command(tmp_path / "none", tmp_path)
    ran = subprocess.run(command, input="{}", capture_output=True, text=True, check=False)
    assert convert.__module__ in command
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
