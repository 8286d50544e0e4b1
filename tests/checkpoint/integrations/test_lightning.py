"""Test that a killed and resumed Lightning Trainer equals an uninterrupted one, bit by bit."""

import os
import shutil
import signal

import pytest
import torch
from checkpoint_training import assert_same
from forked_work import FORKS, exit_code_of
from supervised_link import Supervised, supervised
from waiting import ENDS_S

from deferred import Deferred
from holdfast.checkpoint import Checkpointer, scan, verify
from holdfast.checkpoint.state import random_state
from holdfast.checkpoint.storage.remote import Remote
from holdfast.core import link as link_module
from holdfast.core.errors import BadUse
from holdfast.core.left_out import ENV_LEAVE_OUT
from holdfast.core.link import ENV_ACCUMULATION

lightning = Deferred("lightning_training")
lightning_ranks = Deferred("lightning_ranks")
EPOCHS, BATCHES = 3, 4  # of lightning_training, which is not imported to collect the tests
STEPS = EPOCHS * BATCHES


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Return an uninterrupted trainer, module, folder (one checkpoint a step) and generators."""
    folder = tmp_path_factory.mktemp("straight")
    trainer, module = lightning.train(folder)
    return trainer, module, folder, random_state.capture()


def copy_of(step, folder, to):
    (kept,) = (info.path for info in scan(folder) if info.step == step)
    shutil.copytree(kept, to / kept.name)


def assert_goes_on_as(resumed, straight):
    (trainer, module), (other_trainer, other_module) = resumed, straight[:2]
    assert module.losses == {
        step: loss for step, loss in other_module.losses.items() if step in module.losses
    }
    assert trainer.global_step == other_trainer.global_step == STEPS
    assert_same(module.state_dict(), other_module.state_dict())
    assert_same(trainer.optimizers[0].state_dict(), other_trainer.optimizers[0].state_dict())
    assert_same(
        trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        other_trainer.lr_scheduler_configs[0].scheduler.state_dict(),
    )
    if trainer.early_stopping_callback is not None:
        assert_same(
            trainer.early_stopping_callback.state_dict(),
            other_trainer.early_stopping_callback.state_dict(),
        )


def test_every_step_is_saved_and_verifies(straight):
    found = scan(straight[2])
    assert [info.step for info in found] == list(range(STEPS, 0, -1))
    assert verify(found[0]).state == "verified"


@pytest.mark.parametrize("step", [1, 4, 11])
def test_resumed_from_any_step_it_goes_on_to_the_bit(tmp_path, straight, step):
    """Resume within an epoch and at its end, also from other weights and other random numbers."""
    copy_of(step, straight[2], tmp_path)
    resumed = lightning.train(tmp_path, seed=99)
    assert min(resumed[1].losses) == step
    assert_goes_on_as(resumed, straight)
    assert resumed[0].current_epoch == straight[0].current_epoch
    assert_same(random_state.capture(), straight[3])


def test_a_wrapped_loader_goes_on_where_it_was_without_what_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv(ENV_LEAVE_OUT, "2-2,6-7,12-12")
    numbers = [1, 3, 4, 5, 8, 9, 10, 11]
    options = {"limit_val_batches": 0}  # Lightning evaluates after as many batches as an epoch has
    straight = lightning.train(
        tmp_path / "straight", net=lightning.Wrapped, trainer_options=options
    )
    assert straight[1].numbers == numbers
    for step in (3, 4, 7):  # an epoch ends with 3 and 5
        (tmp_path / str(step)).mkdir()
        copy_of(step, tmp_path / "straight", tmp_path / str(step))
        resumed = lightning.train(
            tmp_path / str(step), seed=99, net=lightning.Wrapped, trainer_options=options
        )
        assert resumed[1].numbers == numbers[step:]
        assert_same(resumed[1].state_dict(), straight[1].state_dict())


def test_a_wrapped_loader_goes_on_after_an_epoch_that_lightning_ends_early(tmp_path):
    options = {"limit_val_batches": 0, "limit_train_batches": 2}
    straight = lightning.train(
        tmp_path / "straight", net=lightning.Wrapped, trainer_options=options
    )
    assert len(straight[1].numbers) == 2 * EPOCHS
    for step in (2, 3):  # an epoch ends with 2 and 4
        (tmp_path / str(step)).mkdir()
        copy_of(step, tmp_path / "straight", tmp_path / str(step))
        resumed = lightning.train(
            tmp_path / str(step), seed=99, net=lightning.Wrapped, trainer_options=options
        )
        assert resumed[1].numbers == straight[1].numbers[step:], step
        assert_same(resumed[1].state_dict(), straight[1].state_dict())


def test_accumulated_gradients_without_what_is_left_out_are_those_of_a_loader_by_hand(
    tmp_path, monkeypatch
):
    """Leave out whole steps at the end of an epoch and at the start of the next; resume, too."""
    options = {"limit_val_batches": 0, "accumulate_grad_batches": 2}
    expected = lightning.train(tmp_path / "by hand", net=lightning.ByHand, trainer_options=options)[
        1
    ]
    assert sorted(expected.losses) == [0, 1, 2, 3]
    monkeypatch.setenv(ENV_LEAVE_OUT, "3-6")
    straight = lightning.train(tmp_path / "straight", net=lightning.InARow, trainer_options=options)
    assert_same(straight[1].state_dict(), expected.state_dict())
    for step in (1, 3):  # an epoch ends with 1 and 2
        (tmp_path / str(step)).mkdir()
        copy_of(step, tmp_path / "straight", tmp_path / str(step))
        resumed = lightning.train(
            tmp_path / str(step), seed=99, net=lightning.InARow, trainer_options=options
        )
        assert_same(resumed[1].state_dict(), expected.state_dict())


def test_on_fewer_nodes_it_accumulates_more(tmp_path, monkeypatch):
    options = {"limit_val_batches": 0}
    twice = {**options, "accumulate_grad_batches": 2}
    expected = lightning.train(tmp_path / "usual", net=lightning.InARow, trainer_options=twice)
    monkeypatch.setenv(ENV_ACCUMULATION, "2")
    trainer, module, *_ = lightning.train(
        tmp_path / "fewer", net=lightning.InARow, trainer_options=options
    )
    assert trainer.accumulate_grad_batches == 2
    assert_same(module.state_dict(), expected[1].state_dict())


def test_what_a_module_does_at_the_end_of_a_batch_is_in_the_step_that_is_saved(tmp_path):
    straight = lightning.train(tmp_path / "straight", net=lightning.Averaged)
    assert "on_train_batch_end" not in vars(straight[1])
    for step in (3, BATCHES):
        copy_of(step, tmp_path / "straight", tmp_path / str(step))
        resumed = lightning.train(tmp_path / str(step), seed=99, net=lightning.Averaged)
        assert_goes_on_as(resumed, straight)


def test_a_training_that_breaks_off_leaves_the_module_as_it_was(tmp_path):
    class Breaks(lightning.Averaged):
        def on_train_batch_end(self, *_):
            raise RuntimeError("it broke")

    module = Breaks()
    with pytest.raises(RuntimeError, match="it broke"):
        lightning.train(tmp_path, net=lambda _: module)
    assert "on_train_batch_end" not in vars(module)


def test_between_batches_the_module_can_be_pickled(tmp_path):
    _, module = lightning.train(tmp_path, net=lightning.Pickled)
    assert len(module.losses) == STEPS


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": STEPS, "max_epochs": -1},
        {"max_epochs": EPOCHS, "limit_val_batches": 0},
        {"max_steps": STEPS, "max_epochs": -1, "limit_val_batches": 0},
    ],
)
def test_however_its_length_is_given_and_whether_it_evaluates_it_goes_on_to_the_bit(
    tmp_path, options
):
    """The fixture `straight` evaluates, and its length is given in epochs."""
    options = {"trainer_options": options}
    straight = (
        *lightning.train(tmp_path / "straight", **options),
        tmp_path / "straight",
        random_state.capture(),
    )
    for step in (2, BATCHES, 2 * BATCHES):
        copy_of(step, tmp_path / "straight", tmp_path / str(step))
        resumed = lightning.train(tmp_path / str(step), seed=99, **options)
        assert min(resumed[1].losses) == step
        assert_goes_on_as(resumed, straight)
        assert resumed[0].current_epoch == straight[0].current_epoch
        assert_same(random_state.capture(), straight[3])


@pytest.mark.parametrize(
    "length", [{"max_steps": 6, "max_epochs": -1}, {"max_epochs": 2}, {"max_steps": 8}]
)
def test_the_final_state_is_saved_though_its_step_is_not_due_and_longer_training_goes_on_from_there(
    tmp_path, straight, length
):
    lightning.train(tmp_path, every=1000, trainer_options=length)
    (info,) = scan(tmp_path)
    assert info.step == length.get("max_steps", 2 * BATCHES)
    longer = {
        name: {"max_steps": STEPS, "max_epochs": EPOCHS}[name]
        for name in length
        if length[name] != -1
    }
    resumed = lightning.train(tmp_path, seed=99, every=1000, trainer_options=length | longer)
    assert min(resumed[1].losses) == info.step
    assert_goes_on_as(resumed, straight)


def test_a_scheduler_that_steps_after_the_epochs_end_is_saved_after_it(tmp_path):
    straight = lightning.train(tmp_path / "straight", net=lightning.WithPlateau, every=BATCHES)
    assert [info.step for info in scan(tmp_path / "straight")] == [
        STEPS,
        2 * BATCHES + 1,
        BATCHES + 1,
    ]
    assert straight[0].optimizers[0].param_groups[0]["lr"] < 1e-2
    copy_of(BATCHES + 1, tmp_path / "straight", tmp_path / "stopped")
    assert_goes_on_as(
        lightning.train(tmp_path / "stopped", seed=99, net=lightning.WithPlateau, every=BATCHES),
        straight,
    )


def test_killed_and_started_again_it_goes_on_to_the_bit(tmp_path, straight):
    assert exit_code_of(lightning.train, tmp_path, kill_at=7) == -signal.SIGKILL
    assert 0 < scan(tmp_path)[0].step <= 7
    assert_goes_on_as(lightning.train(tmp_path), straight)


def test_a_damaged_checkpoint_is_passed_over(tmp_path, straight):
    for info in scan(straight[2]):
        if info.step in (5, 6):
            shutil.copytree(info.path, tmp_path / info.path.name)
    data = scan(tmp_path)[0].path / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    resumed = lightning.train(tmp_path)
    assert min(resumed[1].losses) == 5
    assert_goes_on_as(resumed, straight)


def test_on_a_new_node_it_goes_on_from_what_was_pushed(tmp_path, straight):
    there, folder = tmp_path / "there", tmp_path / "new"
    there.mkdir()
    (pushed,) = (info.path for info in scan(straight[2]) if info.step == 6)
    Remote(there.as_uri()).push(pushed)
    resumed = lightning.train(folder, push_to=there.as_uri())
    assert min(resumed[1].losses) == 6
    assert_goes_on_as(resumed, straight)


def test_ranks_that_are_told_to_stop_save_the_same_step_and_each_goes_on_with_its_own_data(
    tmp_path, caplog
):
    def ranks(stop_at, steps):
        """Run two ranks in forks, and end both with SIGTERM at step `stop_at`, as torchrun does."""
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        saw, asked = FORKS.SimpleQueue(), FORKS.Event()
        started = [
            FORKS.Process(
                target=lightning_ranks.run_rank,
                args=(rank, store.port, tmp_path, saw, asked),
                kwargs={"stop_at": stop_at, "steps": steps},
            )
            for rank in range(2)
        ]
        for rank in started:
            rank.start()
        if stop_at:
            assert asked.wait(ENDS_S)
            for rank in started:
                os.kill(rank.pid, signal.SIGTERM)
        for rank in started:
            rank.join(ENDS_S)
            rank.kill()
        return [rank.exitcode for rank in started], saw

    ends, _ = ranks(5, 1 << 30)
    assert ends == [143, 143]
    (info,) = scan(tmp_path)
    assert verify(info).state == "verified"
    assert info.step >= 6
    theirs = Checkpointer(tmp_path).per_rank_states(info.step)
    loaders = [{"rank": rank, "of_rank": [info.step] * (rank + 1)} for rank in range(2)]
    assert [each["combined_loader"] for each in theirs] == [[each] for each in loaders]

    ends, saw = ranks(0, info.step + 2)
    assert ends == [0, 0]
    assert sorted(saw.get() for _ in range(2)) == [
        (rank, [1000 * rank + info.step + 1, 1000 * rank + info.step + 2]) for rank in range(2)
    ]

    _, module = lightning_ranks.train(tmp_path, steps=info.step + 4)
    assert module.saw == [1, 2]
    assert "has no position in the data for these ranks" in caplog.text


def test_a_run_that_would_begin_anew_over_checkpoints_is_refused(straight):
    with pytest.raises(BadUse, match=r"Pass ckpt_path=saves\.ckpt_path\(\)"):
        lightning.train(straight[2], resume=False)


def test_each_step_is_reported_to_a_supervisor(tmp_path, monkeypatch):
    link = supervised(monkeypatch)
    _, module = lightning.train(tmp_path, every=4, trainer_options={"num_sanity_val_steps": 0})
    assert [step for step, _, _ in link.steps] == list(range(1, STEPS + 1))
    assert [loss for _, loss, _ in link.steps] == pytest.approx(
        [module.losses[step] for step in range(STEPS)]
    )
    assert all(metrics["samples_per_second"] > 0 for _, _, metrics in link.steps)
    order = link.order()
    assert order[:2] == ["watch", "take back"]
    assert order.count("enter evaluate") == order.count("leave evaluate") == EPOCHS
    assert order[-1] == "enter end"


def test_the_optimizers_steps_are_reported_to_a_supervisor(tmp_path, monkeypatch):
    link = supervised(monkeypatch)
    lightning.train(tmp_path, every=4, trainer_options={"accumulate_grad_batches": 2})
    assert [step for step, _, _ in link.steps] == list(range(1, 1 + EPOCHS * 2))


@pytest.mark.parametrize("chains", [True, False])
def test_lightnings_handler_alone_is_taken_the_place_of(tmp_path, monkeypatch, chains):
    """A script's own handler, set after the callback was made, stays in use by Lightning."""
    replaced_by_lightning = []

    class Taken(Supervised):
        def take_back_sigterm(self, replaced):
            replaced_by_lightning.extend(replaced)

    def handler(_number, _frame):
        pass

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(link_module, "_link", Taken())
    try:
        if chains:
            signal.signal(signal.SIGTERM, handler)
        lightning.train(tmp_path, every=100)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (handler in replaced_by_lightning) == chains
