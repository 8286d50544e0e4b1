"""Lightning's Trainer, killed and resumed, is the Trainer that nobody killed, to the bit."""

import shutil
import signal
import subprocess
import sys

import lightning_training
import pytest
from checkpoint_training import assert_same
from lightning_training import BATCHES, EPOCHS, train

from holdfast.checkpoint import rng, scan, verify
from holdfast.checkpoint.remote import Remote
from holdfast.core.errors import BadUse

STEPS = EPOCHS * BATCHES


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """What nobody disturbed: trainer, module, folder of checkpoints, one a step, and the generators at the end."""
    folder = tmp_path_factory.mktemp("straight")
    trainer, module = train(folder)
    return trainer, module, folder, rng.capture()


def assert_goes_on_as(resumed, straight):
    (trainer, module), (other_trainer, other_module) = resumed, straight[:2]
    assert module.losses == {step: loss for step, loss in other_module.losses.items() if step in module.losses}
    assert trainer.global_step == other_trainer.global_step == STEPS
    assert_same(module.state_dict(), other_module.state_dict())
    assert_same(trainer.optimizers[0].state_dict(), other_trainer.optimizers[0].state_dict())
    assert_same(
        trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        other_trainer.lr_scheduler_configs[0].scheduler.state_dict(),
    )
    assert_same(trainer.early_stopping_callback.state_dict(), other_trainer.early_stopping_callback.state_dict())


def test_every_step_is_saved_and_verifies(straight):
    found = scan(straight[2])
    assert [info.step for info in found] == list(range(STEPS, 0, -1))
    assert verify(found[0]).state == "verified"


@pytest.mark.parametrize("step", [1, 3, 4, 6, 8, 11])
def test_resumed_from_any_step_it_goes_on_to_the_bit(tmp_path, straight, step):
    """Within an epoch and at its end; also from other weights and other random numbers."""
    (kept,) = (info.path for info in scan(straight[2]) if info.step == step)
    shutil.copytree(kept, tmp_path / kept.name)
    resumed = train(tmp_path, seed=99)
    assert min(resumed[1].losses) == step
    assert_goes_on_as(resumed, straight)
    assert_same(rng.capture(), straight[3])


@pytest.mark.slow
def test_killed_and_started_again_it_goes_on_to_the_bit(tmp_path, straight):
    command = [sys.executable, lightning_training.__file__, str(tmp_path), "7"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert 0 < scan(tmp_path)[0].step <= 7
    assert_goes_on_as(train(tmp_path), straight)


def test_a_damaged_checkpoint_is_passed_over(tmp_path, straight):
    for info in scan(straight[2]):
        if info.step in (5, 6):
            shutil.copytree(info.path, tmp_path / info.path.name)
    data = scan(tmp_path)[0].path / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    resumed = train(tmp_path)
    assert min(resumed[1].losses) == 5
    assert_goes_on_as(resumed, straight)


def test_on_a_new_node_it_goes_on_from_what_was_pushed(tmp_path, straight):
    there, folder = tmp_path / "there", tmp_path / "new"
    there.mkdir()
    (pushed,) = (info.path for info in scan(straight[2]) if info.step == 6)
    Remote(there.as_uri()).push(pushed)
    resumed = train(folder, push_to=there.as_uri())
    assert min(resumed[1].losses) == 6
    assert_goes_on_as(resumed, straight)


def test_a_run_that_would_begin_anew_over_checkpoints_is_refused(straight):
    with pytest.raises(BadUse, match=r"Pass ckpt_path=saves\.ckpt_path\(\)"):
        train(straight[2], resume=False)
