"""Batches that torchtitan's loader leaves out: its own loader and manager, called as its trainer calls them."""

import ast
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from checkpoint_training import assert_same

from holdfast.core.left_out import ENV_LEAVE_OUT

pytest.importorskip(
    "torchtitan.components.checkpointer", reason="torchtitan, or what it needs, is not installed"
)

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

from holdfast.checkpoint.integrations.torchtitan import HoldfastCheckpointManager
from holdfast.checkpoint.integrations.torchtitan_data import HoldfastDataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:To get the last learning rate"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
]
SIZE = 2


class Numbers(torch.utils.data.IterableDataset):
    """Numbers in a row, but for some batches: a stream with a place, as torchtitan's dataset is."""

    def __init__(self, without):
        self.without, self.at = without, 0

    def __iter__(self):
        while True:
            self.at += 1
            if (self.at - 1) // SIZE + 1 not in self.without:
                yield {"input": torch.full((3,), float(self.at))}, torch.tensor([float(self.at)])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class NumbersLoader(ParallelAwareDataloader):
    """A loader as the ones of torchtitan: its trainer builds it with these parts."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        without: tuple[int, ...] = ()

    def __init__(
        self, config, *, dp_world_size, dp_rank, tokenizer, seq_len, local_batch_size,
        snapshot_every_n_steps,
    ):  # fmt: skip
        super().__init__(
            Numbers(config.without),
            dp_rank,
            dp_world_size,
            batch_size=local_batch_size,
            num_workers=config.num_workers,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )


class Training:
    """Call the loader and the manager in the order of torchtitan's trainer."""

    def __init__(
        self,
        folder,
        loader,
        *,
        seed=0,
        accumulation=1,
        interval=1,
        manager=HoldfastCheckpointManager,
    ):
        torch.manual_seed(seed)
        self.step, self.accumulation, self.seen = 0, accumulation, []
        self.model = torch.nn.Linear(3, 1)
        self.dataloader = loader.build(
            dp_world_size=1,
            dp_rank=0,
            tokenizer=None,
            seq_len=3,
            local_batch_size=SIZE,
            snapshot_every_n_steps=interval * accumulation,
        )
        group = ParamGroupConfig(
            pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2}
        )
        self.optimizers = OptimizersContainer.Config(
            param_groups=[group], implementation="for-loop"
        ).build(model_parts=[self.model])
        self.checkpointer = manager.Config(
            enable=True, folder="checkpoint", interval=interval, keep_latest_k=0
        ).build(
            dataloader=self.dataloader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=LRSchedulersContainer.Config(warmup_steps=3).build(
                optimizers=self.optimizers, training_steps=20
            ),
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]

    def run(self, steps):
        self.checkpointer.load(step=-1)
        batches = iter(
            self.dataloader
        )  # as `Trainer.batch_generator`, which needs a GPU's packages
        while self.step < steps:
            self.step += 1
            self.optimizers.zero_grad()
            for _ in range(self.accumulation):
                inputs, labels = next(batches)
                self.seen.append(int(labels[0, 0] - 1) // SIZE + 1)
                (self.model(inputs["input"]) - labels).square().mean().backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.checkpointer.save(self.step, last_step=False)
        self.checkpointer.close()
        return self


def wrapped(**settings):
    return HoldfastDataLoader.Config(loader=NumbersLoader.Config(**settings))


def test_the_trainer_builds_iterates_and_saves_what_its_settings_name():
    source = Path(find_spec("torchtitan").origin).with_name("trainer.py").read_text()
    calls = [
        ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)
    ]
    (build,) = (call for call in calls if call.startswith("config.dataloader.build("))
    for part in ("dp_world_size", "dp_rank", "tokenizer", "seq_len", "local_batch_size"):
        assert f"{part}=" in build
    assert {"self.batch_generator(self.dataloader)", "iter(data_iterable)"} <= set(calls)
    assert any("dataloader=self.dataloader" in call for call in calls)


@pytest.mark.parametrize(("workers", "accumulation"), [(0, 2), (1, 1)])
def test_a_run_that_leaves_batches_out_equals_one_whose_data_lack_them(
    tmp_path, monkeypatch, workers, accumulation
):
    by_hand = Training(
        tmp_path / "a", NumbersLoader.Config(without=(4, 5)), accumulation=accumulation
    ).run(6)
    Training(tmp_path / "b", wrapped(num_workers=workers), accumulation=accumulation).run(1)
    monkeypatch.setenv(ENV_LEAVE_OUT, "4-5")
    mended = Training(
        tmp_path / "b", wrapped(num_workers=workers), accumulation=accumulation, seed=7
    ).run(6)
    assert mended.seen == by_hand.seen[accumulation:]
    assert not {4, 5} & set(mended.seen)
    assert_same(mended.model.state_dict(), by_hand.model.state_dict())
    # The numbers go on: the next attempt leaves out the same batches and no others.
    monkeypatch.setenv(ENV_LEAVE_OUT, "4-5,13-13")
    again = Training(
        tmp_path / "b", wrapped(num_workers=workers), accumulation=accumulation, seed=8
    ).run(12)
    last = mended.seen[-1]
    first = [number for number in range(last + 1, last + 30) if number != 13]
    assert again.seen == first[: 6 * accumulation]


def test_a_save_within_an_interval_of_the_loader_has_the_place_of_its_step(tmp_path):
    straight = Training(tmp_path / "a", wrapped(), interval=1).run(7)
    training = Training(tmp_path / "b", wrapped(num_workers=1), interval=3)
    training.run(4)  # saved at 3
    resumed = Training(tmp_path / "b", wrapped(num_workers=1), interval=3).run(7)
    assert resumed.seen == straight.seen[3:]


def test_it_goes_on_from_the_loader_alone_and_the_other_way_round(tmp_path, monkeypatch):
    Training(tmp_path / "a", NumbersLoader.Config()).run(3)
    assert Training(tmp_path / "a", wrapped()).run(5).seen == [4, 5]
    assert Training(tmp_path / "a", NumbersLoader.Config()).run(7).seen == [6, 7]
    assert Training(tmp_path / "a", wrapped()).run(8).seen == [8]


def test_it_works_with_torchtitans_own_manager(tmp_path, monkeypatch):
    Training(tmp_path, wrapped(), manager=CheckpointManager).run(3)
    monkeypatch.setenv(ENV_LEAVE_OUT, "5-5")
    resumed = Training(tmp_path, wrapped(), manager=CheckpointManager).run(5)
    assert resumed.seen == [4, 6]


def test_a_save_between_a_restore_of_the_loader_alone_and_its_next_batch_keeps_the_place():
    parts = {
        "dp_world_size": 1,
        "dp_rank": 0,
        "tokenizer": None,
        "seq_len": 3,
        "local_batch_size": SIZE,
        "snapshot_every_n_steps": 1,
    }
    alone = NumbersLoader.Config().build(**parts)
    batches = iter(alone)
    next(batches)
    around = HoldfastDataLoader.Config(loader=NumbersLoader.Config())
    first, second = around.build(**parts), around.build(**parts)
    first.load_state_dict(alone.state_dict())
    second.load_state_dict(first.state_dict())
    assert_same(next(iter(second)), next(batches))
