"""Test that a killed and resumed `transformers.Trainer` equals an uninterrupted one, bit by bit.

A Trainer that leaves out batches equals one that never had them.
"""

import copy
import itertools
import os
import shutil
import signal

import pytest
import torch
from checkpoint_training import assert_same
from forked_work import exit_code_of
from supervised_link import supervised

from deferred import Deferred
from holdfast.checkpoint import scan, verify
from holdfast.checkpoint.state import random_state
from holdfast.core import link as link_module
from holdfast.core.errors import BadUse
from holdfast.core.left_out import ENV_LEAVE_OUT, LeftOut
from holdfast.core.link import ENV_ACCUMULATION, Unsupervised, take_batches

hf = Deferred("huggingface_training")
MEASURED = {"loss", "grad_norm", "learning_rate", "eval_loss", "step", "epoch"}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Return an uninterrupted trainer, its folder (one checkpoint a step), and its generators."""
    folder = tmp_path_factory.mktemp("straight")
    trainer = hf.train(folder)
    return trainer, folder, random_state.capture()


def said(trainer):
    return [
        {name: entry[name] for name in MEASURED & entry.keys()}
        for entry in trainer.state.log_history[:-1]
    ]


def assert_goes_on_as(trainer, straight):
    assert said(trainer) == said(straight)
    assert trainer.state.best_global_step == straight.state.best_global_step
    for name in ("model", "optimizer", "lr_scheduler"):
        assert_same(getattr(trainer, name).state_dict(), getattr(straight, name).state_dict(), name)


def test_every_step_is_saved_and_verifies(straight):
    _, folder, _ = straight
    found = scan(folder)
    assert [info.step for info in found] == list(range(hf.STEPS, 0, -1))
    assert verify(found[0]).state == "verified"


@pytest.mark.parametrize("step", [3, 4, 8])
def test_resumed_from_any_step_it_goes_on_to_the_bit(tmp_path, straight, step):
    """Resume within an epoch, at its end, around an evaluation, and from other weights and seeds."""
    trainer, folder, generators = straight
    (kept,) = (info.path for info in scan(folder) if info.step == step)
    shutil.copytree(kept, tmp_path / kept.name)
    assert_goes_on_as(hf.train(tmp_path, seed=99), trainer)
    assert_same(random_state.capture(), generators)


def test_killed_and_started_again_it_goes_on_to_the_bit(tmp_path, straight):
    assert exit_code_of(hf.train, tmp_path, callbacks=[hf.DiesAt(7)]) == -signal.SIGKILL
    assert 0 < scan(tmp_path)[0].step < 7
    assert_goes_on_as(hf.train(tmp_path), straight[0])


def test_the_final_state_is_saved_though_its_step_is_not_due(tmp_path, straight):
    trainer = hf.train(tmp_path, saving={"every": 1000})
    assert [info.step for info in scan(tmp_path)] == [hf.STEPS]
    again = hf.train(
        tmp_path, saving={"every": 1000}, lr_scheduler_type="constant"
    )  # no step is left
    assert again.state.global_step == hf.STEPS
    assert [info.step for info in scan(tmp_path)] == [hf.STEPS]
    assert_same(again.model.state_dict(), trainer.model.state_dict())
    assert_same(trainer.model.state_dict(), straight[0].model.state_dict())


def test_a_run_that_ended_with_an_epoch_is_not_gone_on_with(tmp_path):
    options = {"max_steps": 2 * hf.STEPS_AN_EPOCH, "num_train_epochs": 9}
    ended = hf.train(tmp_path, **options)
    again = hf.train(tmp_path, **options)
    assert again.state.global_step == 2 * hf.STEPS_AN_EPOCH
    assert_same(again.model.state_dict(), ended.model.state_dict())
    longer, saves = hf.make(tmp_path)
    longer.train(resume_from_checkpoint=saves.resume(longer))
    assert longer.state.global_step == hf.STEPS


def test_one_that_was_through_and_broke_off_can_be_trained_longer(tmp_path, straight):
    newest = scan(straight[1])[0].path
    shutil.copytree(newest, tmp_path / newest.name)
    trainer, saves = hf.make(tmp_path, callbacks=[hf.Breaks()])
    own = trainer.get_batch_samples = trainer.get_batch_samples
    with pytest.raises(RuntimeError, match="it broke"):
        trainer.train(resume_from_checkpoint=saves.resume(trainer))
    trainer.remove_callback(hf.Breaks)
    trainer.args.max_steps = hf.STEPS + 2
    trainer.train(resume_from_checkpoint=saves.resume(trainer))
    assert trainer.state.global_step == hf.STEPS + 2
    assert vars(trainer)["get_batch_samples"] == own


def test_callbacks_with_a_state_go_on_where_the_trainer_restores_them(tmp_path, caplog):
    options = {
        "restore_callback_states_from_checkpoint": True,
        "eval_steps": 1,
        "patience": 4,
        "first": [hf.Unimproved()],
    }
    stopped = hf.train(tmp_path / "straight", **options)
    assert stopped.state.global_step == 5
    (kept,) = (info.path for info in scan(tmp_path / "straight") if info.step == 3)
    shutil.copytree(kept, tmp_path / "resumed" / kept.name)
    resumed = hf.train(tmp_path / "resumed", **options)
    assert resumed.state.global_step == 5
    assert "will lose its state" not in caplog.text
    make_and_resume = hf.make(tmp_path / "warned")
    make_and_resume[1].resume(make_and_resume[0])
    assert "EarlyStoppingCallback will lose its state when training is resumed" in caplog.text


def test_an_evaluation_that_ends_the_training_after_an_epoch_leaves_it_saved(tmp_path):
    options = {
        "saving": {"every": 1000},
        "eval_strategy": "epoch",
        "callbacks": [hf.StopsOnceItIsEvaluated()],
    }
    hf.train(tmp_path, **options)
    assert [info.step for info in scan(tmp_path)] == [hf.STEPS_AN_EPOCH]


def test_the_workers_of_its_data_loader_outlive_sigterm_for_as_long_as_the_trainer(
    tmp_path, monkeypatch
):
    item = hf.Text.__getitem__

    def item_after_sigterm(self, index):
        if not (
            tmp_path / "sent"
        ).exists():  # a worker of the training, since only these outlive SIGTERM
            assert torch.utils.data.get_worker_info() is not None
            (tmp_path / "sent").touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return item(self, index)

    monkeypatch.setattr(hf.Text, "__getitem__", item_after_sigterm)
    saving = {"sigterm_grace_s": 300.0}
    trainer = hf.train(tmp_path / "saves", saving=saving, dataloader_num_workers=1, max_steps=2)
    assert trainer.state.global_step == 2
    assert (tmp_path / "sent").exists()
    set_up = trainer.callback_handler.train_dataloader.worker_init_fn
    assert set_up.args[1] is not None, "the Trainer's own, which seeds them"


def test_a_damaged_checkpoint_is_passed_over(tmp_path, straight):
    trainer, folder, _ = straight
    for info in scan(folder):
        if info.step in (5, 6):
            shutil.copytree(info.path, tmp_path / info.path.name)
    data = scan(tmp_path)[0].path / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert_goes_on_as(hf.train(tmp_path), trainer)


def test_what_is_not_saved_to_the_bit_is_refused(tmp_path):
    trainer, saves = hf.make(tmp_path, save_strategy="steps")
    with pytest.raises(BadUse, match="Set it to 'no'"):
        saves.resume(trainer)
    trainer, saves = hf.make(tmp_path, auto_find_batch_size=True)
    with pytest.raises(BadUse, match="Set the batch size instead"):
        saves.resume(trainer)
    trainer, saves = hf.make(tmp_path, train_sampling_strategy="group_by_length")
    with pytest.raises(BadUse, match="Set one of random, sequential"):
        saves.resume(trainer)
    trainer, saves = hf.make(tmp_path, accelerator_config={"use_seedable_sampler": False})
    with pytest.raises(BadUse, match="Leave it on in accelerator_config"):
        saves.resume(trainer)
    trainer, saves = hf.make(tmp_path)
    trainer.model_init = lambda: None
    with pytest.raises(BadUse, match="Pass the Trainer the model itself"):
        saves.resume(trainer)
    trainer, _ = hf.make(tmp_path)
    with pytest.raises(BadUse, match=r"saves\.resume\(trainer\)"):
        trainer.train()


def test_a_run_that_would_begin_anew_over_checkpoints_is_refused(tmp_path, straight):
    _, folder, _ = straight
    trainer, saves = hf.make(tmp_path)
    shutil.copytree(scan(folder)[0].path, tmp_path / scan(folder)[0].path.name)
    saves.resume(trainer)
    with pytest.raises(BadUse, match="training starts over"):
        trainer.train()


def test_another_model_than_the_one_that_was_restored_is_refused(tmp_path, straight):
    _, folder, _ = straight
    trainer, saves = hf.make(tmp_path)
    shutil.copytree(scan(folder)[0].path, tmp_path / scan(folder)[0].path.name)
    resumed = saves.resume(trainer)
    trainer.model = trainer.model_wrapped = copy.deepcopy(trainer.model)
    with pytest.raises(BadUse, match="model was replaced"):
        trainer.train(resume_from_checkpoint=resumed)


def made(folder, **options):
    """Return a trainer without evaluation, and its callback."""
    trainer, saves = hf.make(
        folder, **{"eval_strategy": "no", "metric_for_best_model": None, **options}
    )
    trainer.remove_callback(hf.EarlyStoppingCallback)
    return trainer, saves


class ByHand:
    """The batches of a Trainer's first epochs, without some of them, in epochs of one length."""

    def __init__(self, loader, left_out):
        epochs = []
        for epoch in range(4):
            loader.set_epoch(epoch)
            epochs += list(loader.batch_sampler)
        kept = [one for number, one in enumerate(epochs, 1) if number not in left_out]
        self.length = len(loader)
        self.kept = iter(kept)

    def __len__(self):
        return self.length

    def __iter__(self):
        return itertools.islice(self.kept, self.length)


def trained_by_hand(folder, left_out, **options):
    trainer, saves = made(folder, **options)
    trainer.remove_callback(saves)
    loader = trainer.get_train_dataloader()
    vars(loader.base_dataloader)["batch_sampler"] = ByHand(trainer.get_train_dataloader(), left_out)
    trainer.get_train_dataloader = lambda: loader
    trainer.train()
    return trainer.model.state_dict()


def trained(folder, **options):
    trainer, saves = made(folder, **options)
    trainer.train(resume_from_checkpoint=saves.resume(trainer))
    assert trainer.state.global_step == hf.STEPS
    return trainer.model.state_dict()


class Reported(Unsupervised):
    def __init__(self):
        self.batches, self.skipped = {}, []

    def step(self, step, loss, metrics):
        self.batches[step] = take_batches()

    def emit(self, kind, data):
        if kind == "batches_skipped":
            self.skipped.append((data["first"], data["last"], data["epoch"]))


def test_a_trainer_leaves_out_as_if_by_hand_and_goes_on_so_from_any_step(tmp_path, monkeypatch):
    """Leave out whole steps and single batches, within and across epochs; resume at several steps."""
    text = "3-4,8-9,18-18"
    expected = trained_by_hand(tmp_path, LeftOut.of_text(text))
    monkeypatch.setenv(ENV_LEAVE_OUT, text)
    link = Reported()
    monkeypatch.setattr(link_module, "_link", link)
    take_batches()
    assert_same(trained(tmp_path / "straight"), expected)
    assert link.batches == {
        1: (1, 2), 2: (5, 6), 3: (7, 10), 4: (11, 12), 5: (13, 14), 6: (15, 16), 7: (17, 19), 8: (20, 21), 9: (22, 23)
    }  # fmt: skip
    assert link.skipped == [(3, 4, 0), (8, 9, 0), (18, 18, 2)]
    for step in (2, hf.STEPS_AN_EPOCH, 7):
        (kept,) = (info.path for info in scan(tmp_path / "straight") if info.step == step)
        shutil.copytree(kept, tmp_path / str(step) / kept.name)
        assert_same(trained(tmp_path / str(step), seed=99), expected)


def test_without_anything_left_out_a_trainer_trains_as_without_holdfast(tmp_path):
    plain = trained_by_hand(tmp_path, LeftOut())
    assert_same(trained(tmp_path / "ours"), plain)


def test_on_fewer_ranks_a_trainer_accumulates_more_and_the_batches_keep_their_numbers(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(ENV_LEAVE_OUT, "2-2")
    monkeypatch.setenv(ENV_ACCUMULATION, "2")
    link = Reported()
    monkeypatch.setattr(link_module, "_link", link)
    take_batches()
    ours = trained(tmp_path / "ours", gradient_accumulation_steps=1)
    assert link.batches == {1: (1, 1), **{step: (step + 1, step + 1) for step in range(2, 10)}}
    monkeypatch.delenv(ENV_ACCUMULATION)
    assert_same(ours, trained_by_hand(tmp_path, LeftOut.of_text("3-4")))


def test_the_accumulation_is_multiplied_once(tmp_path, monkeypatch):
    monkeypatch.setenv(ENV_ACCUMULATION, "3")
    trainer, saves = hf.make(tmp_path)
    assert saves.resume(trainer) is None
    assert saves.resume(trainer) is None
    assert trainer.args.gradient_accumulation_steps == 6


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (hf.Text()[index] for index in range(15))


def test_a_stream_is_left_as_it_is_and_that_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(ENV_LEAVE_OUT, "1-2")
    trainer, saves = made(tmp_path, max_steps=1)
    trainer.train_dataset = Stream()
    trainer.train(resume_from_checkpoint=saves.resume(trainer))
    assert "Batches 1-2 are not left out" in caplog.text


def test_each_step_is_reported_to_a_supervisor(tmp_path, monkeypatch):
    link = supervised(monkeypatch)
    trainer = hf.train(tmp_path, saving={"every": 4}, include_num_input_tokens_seen="all")
    last = hf.STEPS
    losses = {
        entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry
    }
    assert {step: loss for step, loss, _ in link.steps} == losses
    assert [step for step, _, _ in link.steps] == list(range(1, last + 1))
    for _, _, metrics in link.steps:
        assert metrics.keys() == {
            "samples_per_second",
            "tokens_per_second",
            "grad_norm",
            "learning_rate",
        }
        assert metrics["tokens_per_second"] > metrics["samples_per_second"] > 0
    order = link.order()
    assert order[0] == "watch"
    assert "take back" not in order, (
        "this trainer has no handler of its own; one that is there is the script's"
    )
    assert order.count("enter evaluate") == order.count("leave evaluate") == 3
    assert order[-1] == "enter end"
    link.reported.clear()
    trainer.evaluate()
    assert link.order() == ["leave end", "enter evaluate", "leave evaluate", "enter end"]


def test_a_step_that_is_not_logged_is_reported_to_a_supervisor(tmp_path, monkeypatch):
    link = supervised(monkeypatch)
    hf.train(tmp_path, saving={"every": 100}, logging_steps=4, eval_steps=100)
    assert [step for step, _, _ in link.steps] == list(range(1, hf.STEPS + 1))
    assert [step for step, loss, _ in link.steps if loss is not None] == [4, 8]
