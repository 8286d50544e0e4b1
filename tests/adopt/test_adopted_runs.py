"""Run scripts to which `holdfast init` has added Holdfast: killed once, they end as if nothing was."""

import os
import runpy
import signal
import subprocess
import sys

import pytest
import torch
from user_scripts import EPOCH_FUNCTION, EPOCHS, FSDP2, HUGGINGFACE, LIGHTNING, STEPS

import light_torchrun
from holdfast.adopt import adoption_of
from holdfast.core.ledger import Ledger
from holdfast.core.paths import ledger_url

MORTAL = """\
import os, pathlib, signal, time

calls = 0

def saved():
    try:
        return list(pathlib.Path().rglob("step-*/holdfast.json"))
    except FileNotFoundError:  # a folder was renamed during the search
        return []

def mortal():
    global calls
    calls += 1
    if calls == DIES and not pathlib.Path("killed").exists():
        while not saved():
            time.sleep(0.01)
        pathlib.Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

"""
"""Kill the process at a call of `mortal`, once, as soon as a checkpoint is durable."""


def run(folder, *command):
    """Run a command in a folder."""
    environment = {
        **os.environ,
        "HOLDFAST_HOME": str(folder / ".holdfast"),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",  # noqa: PTH120
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def here(folder, monkeypatch):
    """Run the script of a folder in this process, which has imported torch already.

    Returns:
        The final weights, and the number of calls of `mortal`.
    """
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["train.py"])
        calls = runpy.run_path("train.py", run_name="__main__")["calls"]
    return torch.load(folder / "model.pt"), calls


def undisturbed(folder, script, monkeypatch):
    """Return the final weights, and the number of calls of `mortal`, of a script without Holdfast."""
    folder.mkdir()
    (folder / "train.py").write_text(script)
    (folder / "killed").touch()
    return here(folder, monkeypatch)


def adopted(folder, script, every):
    """Write a script to a folder, with Holdfast, and a save at each `every` steps."""
    path = folder / "train.py"
    path.write_text(script)
    adoption_of(path).write()
    path.write_text(path.read_text().replace("every=100", f"every={every}"))


EPOCHS_LINE = "            loss = F.mse_loss"


def with_mortal(script, line, dies):
    """Return a script that calls `mortal` before a line."""
    assert script.count(line) == 1
    indent = line[: len(line) - len(line.lstrip())]
    return MORTAL.replace("DIES", str(dies)) + script.replace(line, f"{indent}mortal()\n{line}")


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_killed_run_ends_with_the_weights_of_the_script_without_holdfast(tmp_path, monkeypatch):
    # It is killed in the middle of the second epoch, between two micro-batches of a step.
    script = with_mortal(EPOCHS, EPOCHS_LINE, 42)
    expected, _ = undisturbed(tmp_path / "plain", script, monkeypatch)
    folder = tmp_path / "adopted"
    folder.mkdir()
    adopted(folder, script, every=3)
    holdfast = (sys.executable, "-m", "holdfast.cli.main")
    job = light_torchrun.command(folder, 1, "train.py")
    run(folder, *holdfast, "run", "--name", "r", "--", *job)
    assert (folder / "killed").exists()
    with Ledger.open(ledger_url(folder / ".holdfast")) as ledger:
        assert [one.action for one in ledger.incidents("r")] == ["restart"]
        second = ledger.attempts("r")[1]
    assert second.start_step, "the second attempt began at a checkpoint"
    assert_same(torch.load(folder / "model.pt"), expected)


@pytest.mark.parametrize(
    ("script", "line", "dies", "every"),
    [
        # A save is due at the last step of the first epoch, whose loss is read after the loop.
        pytest.param(EPOCHS, EPOCHS_LINE, 45, 15, id="epoch-end"),
        pytest.param(EPOCH_FUNCTION, "        loss = nn", 20, 3, id="function"),
        pytest.param(STEPS, "\tfor micro", 25, 3, id="steps"),
        pytest.param(HUGGINGFACE, "        tokens = torch.arange", 52, 2, id="huggingface"),
    ],
)
def test_a_script_that_is_killed_and_started_again_ends_with_the_same_weights(
    tmp_path, monkeypatch, script, line, dies, every
):
    script = with_mortal(script, line, dies)
    expected, all_calls = undisturbed(tmp_path / "plain", script, monkeypatch)
    folder = tmp_path / "adopted"
    folder.mkdir()
    adopted(folder, script, every=every)
    killed = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    found, calls = here(folder, monkeypatch)
    assert calls < all_calls, "it began at a checkpoint"
    assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "last"),
    [pytest.param(LIGHTNING, 40, id="lightning"), pytest.param(FSDP2, 20, id="fsdp2")],
)
def test_the_last_step_of_an_adopted_script_is_saved(tmp_path, script, last):
    adopted(tmp_path, script, every=7)
    run(tmp_path, *light_torchrun.command(tmp_path, 1, "train.py"))
    assert (tmp_path / f"checkpoints/step-{last:010}/holdfast.json").exists()
