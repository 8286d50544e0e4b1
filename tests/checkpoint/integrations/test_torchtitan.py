"""Test the installed torchtitan, whose trainer builds and calls a manager as these tests do."""

import ast
import fcntl
import inspect
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from checkpoint_training import assert_same

from holdfast.checkpoint import scan, verify
from holdfast.core.errors import DamagedCheckpoint

pytest.importorskip(
    "torchtitan.components.checkpointer", reason="torchtitan, or what it needs, is not installed"
)

from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

from holdfast.checkpoint.integrations.torchtitan import HoldfastCheckpointManager

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings(
        "ignore:To get the last learning rate"
    ),  # torchtitan's schedule does, when it is loaded
]


class Loader:
    """Yield consecutive numbers; the state has the rank in its name, as torchtitan's has."""

    drawn = 0

    def state_dict(self):
        return {"dp_rank_0": self.drawn, "world_size": 1}

    def load_state_dict(self, state):
        self.drawn = state["dp_rank_0"]


class Training:
    """The calls of torchtitan's trainer to its manager, in order."""

    def __init__(self, folder, *, seed=0, manager=HoldfastCheckpointManager, **settings):
        torch.manual_seed(seed)
        self.step = 0
        self.model = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1)
        )
        self.loader, self.losses = Loader(), []
        group = ParamGroupConfig(
            pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2}
        )
        self.optimizers = OptimizersContainer.Config(
            param_groups=[group], implementation="for-loop"
        ).build(model_parts=[self.model])
        self.schedule = LRSchedulersContainer.Config(warmup_steps=3).build(
            optimizers=self.optimizers, training_steps=20
        )
        config = manager.Config(
            enable=True, folder="checkpoint", **{"interval": 1, "keep_latest_k": 0, **settings}
        )
        self.checkpointer = config.build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedule,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]

    def run(self, steps, *, load_step=-1, total=100):
        self.loaded = self.checkpointer.load(step=load_step)
        while self.step < steps:
            self.step += 1
            self.loader.drawn += 1
            loss = (
                (self.model(torch.full((2, 3), float(self.loader.drawn))) - torch.randn(2, 1))
                .square()
                .mean()
            )
            self.optimizers.zero_grad()
            loss.backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedule.step()
            self.losses.append(loss.item())
            self.checkpointer.save(self.step, last_step=self.step == total)
        self.checkpointer.close()
        return self


def assert_goes_on_as(resumed, straight):
    assert resumed.losses == straight.losses[-len(resumed.losses) :]
    for name in ("model", "optimizers", "schedule", "loader"):
        assert_same(getattr(resumed, name).state_dict(), getattr(straight, name).state_dict(), name)


def test_it_is_a_manager_as_the_trainer_uses_one():
    assert issubclass(HoldfastCheckpointManager, BaseCheckpointManager)
    assert not inspect.isabstract(HoldfastCheckpointManager)
    assert HoldfastCheckpointManager.Config._owner is HoldfastCheckpointManager
    source = Path(find_spec("torchtitan").origin).with_name("trainer.py").read_text()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    used = {
        call.func.attr
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "self.checkpointer"
    }
    assert used == {"load", "save", "maybe_wait_for_staging", "close"}
    (build,) = (call for call in calls if ast.unparse(call.func) == "config.checkpoint.build")
    handed = {keyword.arg for keyword in build.keywords}
    assert handed == set(inspect.signature(CheckpointManager.__init__).parameters) - {
        "self",
        "config",
    }


@pytest.mark.parametrize("step", [-1, 3])
def test_it_goes_on_to_the_bit(tmp_path, step):
    straight = Training(tmp_path / "straight").run(8)
    assert not straight.loaded
    Training(tmp_path / "stopped").run(5)
    resumed = Training(tmp_path / "stopped", seed=9).run(8, load_step=step)
    assert resumed.loaded
    assert len(resumed.losses) == 8 - (5 if step == -1 else step)
    assert_goes_on_as(resumed, straight)
    assert verify(scan(tmp_path / "stopped/checkpoint")[0]).state == "verified"


def test_of_a_seed_the_model_alone_is_taken(tmp_path):
    """For example on another rank, whose position in the data the checkpoint lacks."""
    seed = Training(tmp_path, last_save_model_only=False)
    seed.loader.drawn = 7
    seed.checkpointer.save(0, last_step=True)
    seed.checkpointer.close()
    assert [info.step for info in scan(tmp_path / "checkpoint")] == [0]
    started = Training(tmp_path, seed=5).run(0)
    assert started.loaded
    assert_same(started.model.state_dict(), seed.model.state_dict())
    assert started.loader.drawn == 0


def test_a_first_save_that_was_killed_or_is_under_way_is_no_checkpoint(tmp_path):
    left = tmp_path / "checkpoint" / ".step-0000000005.ab-1.tmp"
    left.mkdir(parents=True)
    (left / ".metadata").write_bytes(b"of a save that has not ended")
    under_way = os.open(left, os.O_RDONLY)
    fcntl.flock(under_way, fcntl.LOCK_EX)  # as the writing process does
    Training(tmp_path).run(2)
    os.close(under_way)
    assert [info.step for info in scan(tmp_path / "checkpoint")] == [2, 1]


def test_settings_of_torchtitan_are_kept(tmp_path):
    folder = tmp_path / "checkpoint"
    training = Training(
        tmp_path, interval=3, keep_latest_k=2, enable_first_step_checkpoint=True
    ).run(2)
    assert [info.step for info in scan(folder)] == [1]
    training.checkpointer.close()
    shutil.rmtree(tmp_path)
    training = Training(tmp_path, interval=3, keep_latest_k=2).run(10, total=10)
    assert [info.step for info in scan(folder)] == [9, 6]
    assert (folder / "step-10" / ".metadata").exists(), (
        "the last save is torchtitan's own, of the model alone"
    )
    full = Training(tmp_path / "full", interval=3, last_save_model_only=False).run(10, total=10)
    assert [info.step for info in scan(tmp_path / "full/checkpoint")] == [10, 9, 6, 3]
    assert_same(full.losses[:6], training.losses[:6])
    assert not Training(tmp_path / "no", load_only=True).run(2).loaded
    assert scan(tmp_path / "no/checkpoint") == []


def test_it_goes_on_from_torchtitans_own_and_the_other_way_round(tmp_path):
    theirs = Training(tmp_path / "theirs", manager=CheckpointManager).run(2)
    ours = Training(tmp_path / "theirs", seed=9).run(2)
    assert (ours.loaded, ours.step) == (True, 2)
    for name in ("model", "optimizers", "schedule", "loader"):
        assert_same(getattr(ours, name).state_dict(), getattr(theirs, name).state_dict(), name)

    Training(tmp_path / "ours").run(2)
    (newest, *_) = scan(tmp_path / "ours/checkpoint")
    again = Training(
        tmp_path / "new",
        seed=9,
        manager=CheckpointManager,
        initial_load_path=str(newest.path),
        initial_load_model_only=False,
    ).run(2)
    assert again.loaded
    assert_same(again.model.state_dict(), theirs.model.state_dict())


def test_a_damaged_checkpoint_is_passed_over_or_refused_where_it_was_asked_for(tmp_path):
    straight = Training(tmp_path / "straight").run(6)
    Training(tmp_path / "stopped").run(4)
    shutil.copytree(tmp_path / "stopped", tmp_path / "asked")
    for folder in ("stopped", "asked"):
        data = scan(tmp_path / folder / "checkpoint")[0].path / "__0_0.distcp"
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    resumed = Training(tmp_path / "stopped", seed=9).run(6)
    assert len(resumed.losses) == 3
    assert_goes_on_as(resumed, straight)
    with pytest.raises(DamagedCheckpoint, match="Leave load_step out"):
        Training(tmp_path / "asked", seed=9).run(6, load_step=4)
