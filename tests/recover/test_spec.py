"""The checks of a run's specification before the start."""

import shutil
import sys
from pathlib import Path

import pytest

from holdfast.core.errors import BadUse, NotFound
from holdfast.recover.detectors.hang import HangLimits
from holdfast.recover.spec import RunSpec


def test_what_the_ledger_keeps_is_the_same_run_again(tmp_path):
    (tmp_path / "a b.py").touch()
    spec = RunSpec(
        command=("python", "a b.py", "--x=ü"),
        cwd=str(tmp_path),
        nproc=3,
        hangs=HangLimits(floor_s=2),
    )
    assert (
        RunSpec.from_options(
            list(spec.command), spec.cwd, {**spec.to_options(), "of a later version": 1}
        )
        == spec
    )
    assert str(spec) == "python 'a b.py' '--x=ü'"


def test_any_command_runs_under_torchrun_through_the_shim(tmp_path):
    launcher = RunSpec(
        command=("bash", "-c", "echo 1"), cwd=str(tmp_path), nproc=2
    ).launcher_command(0, "127.0.0.1", 0)
    at = launcher.index("holdfast.recover.shim.rank_shim")
    assert launcher[at - 4 : at] == ["--nproc-per-node=2", "--no-python", sys.executable, "-m"]
    assert launcher[at + 1 :] == [shutil.which("bash"), "-c", "echo 1"]


def test_programs_beside_holdfast_are_found_without_an_activated_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    spec = RunSpec(command=("torchrun", "train.py"), cwd=str(tmp_path))
    assert spec.launcher_command(0, "127.0.0.1", 0)[0] == str(
        Path(sys.executable).with_name("torchrun")
    )
    assert spec.rank_python() == str(Path(sys.executable).with_name("python"))


def test_the_scripts_own_arguments_are_not_taken_for_torchruns(tmp_path):
    RunSpec(
        command=("torchrun", "train.py", "--nnodes", "4", "--max-restarts=3"), cwd=str(tmp_path)
    )
    RunSpec(
        command=("torchrun", "--nnodes=1", "--max_restarts", "0", "-m", "train", "--no-python"),
        cwd=str(tmp_path),
    )


def test_a_folder_that_is_gone_is_said(tmp_path):
    with pytest.raises(NotFound, match="no longer exists"):
        RunSpec(command=("bash",), cwd=str(tmp_path / "gone"))


def test_of_several_nodes_torchrun_meets_by_the_words_of_the_agent(tmp_path):
    own = ["--nnodes", "4", "--rdzv-backend=c10d", "--rdzv_endpoint=n1:29500", "--standalone"]
    command = ("torchrun", *own, "--nproc-per-node", "8", "train.py", "--nnodes", "7")
    spec = RunSpec(command=command, cwd=str(tmp_path), nnodes=4)
    meeting = ["--nnodes=4", "--node-rank=2", "--master-addr=10.0.0.1", "--master-port=4242"]
    script = ["--nproc-per-node", "8", "train.py", "--nnodes", "7"]
    assert spec.launcher_command(2, "10.0.0.1", 4242)[1:] == [*meeting, *script]
    bash = RunSpec(command=("bash",), cwd=str(tmp_path), nnodes=4).launcher_command(2, "h", 1)
    assert ("--standalone" in bash, "--node-rank=2" in bash) == (False, True)


def test_a_least_number_of_nodes_that_no_smaller_size_has_is_refused_at_once(tmp_path):
    (tmp_path / "a.py").touch()
    given = {"command": ("python", "a.py"), "cwd": str(tmp_path), "nnodes": 6}
    with pytest.raises(BadUse, match=r"--min-nodes is 4; it must be at most 3, since .* divide 6"):
        RunSpec(**given, min_nodes=4)
    assert RunSpec(**given, min_nodes=3).sizes == (6, 3)
    assert RunSpec(**given, min_nodes=6).sizes == (6,)
