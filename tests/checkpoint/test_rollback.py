"""Test a return of the training to a healthy checkpoint."""

import pytest
import torch

from holdfast.checkpoint import Checkpointer, newest_healthy, note_healthy, roll_back, scan
from holdfast.core.errors import NotFound


@pytest.fixture
def folder(tmp_path):
    """Return a folder with five steps, of which the second and the fourth are healthy."""
    with Checkpointer(tmp_path, keep=None) as ckpt:
        for step in (10, 20, 30, 40, 50):
            ckpt.save(step, {"w": torch.full((4,), float(step))}).result()
    for step in (20, 40):
        note_healthy(tmp_path / f"step-{step:010}", by="test", now_s=0.0)
    return tmp_path


def restored(folder):
    state = {"w": torch.zeros(4)}
    with Checkpointer(folder, read_only=True) as ckpt:
        return ckpt.restore(state), state["w"][0].item()


def test_the_newest_healthy_checkpoint_before_a_step_is_found(folder):
    for before_step, to in ((60, 40), (41, 40), (40, 20), (21, 20), (20, None), (5, None)):
        assert newest_healthy(folder, before_step=before_step) == to, before_step


@pytest.mark.parametrize("to", [40, 20])
def test_the_checkpoint_that_was_gone_back_to_is_restored_next(folder, to):
    roll_back(folder, to_step=to)
    assert restored(folder) == (to, to)
    abandoned = [info.step for info in scan(folder) if info.abandoned]
    assert abandoned == [step for step in (50, 40, 30) if step > to]


def test_the_next_saves_are_of_the_line_and_a_second_rollback_goes_further_back(folder):
    roll_back(folder, to_step=40)
    with Checkpointer(folder, keep=None) as ckpt:
        state = {"w": torch.zeros(4)}
        assert ckpt.restore(state) == 40
        ckpt.save(50, {"w": torch.full((4,), -50.0)}).result()
    assert restored(folder) == (50, -50)
    assert newest_healthy(folder, before_step=60) == 40
    roll_back(folder, to_step=20)
    assert restored(folder) == (20, 20)
    assert newest_healthy(folder, before_step=60) == 20


def test_a_healthy_checkpoint_that_is_not_whole_is_passed_over(folder):
    (whole,) = [info for info in scan(folder) if info.step == 40]
    next(whole.path.glob("*.distcp")).unlink()
    assert newest_healthy(folder, before_step=60) == 20


def test_a_folder_that_is_gone_is_named(tmp_path):
    for call in (
        lambda: newest_healthy(tmp_path / "gone", before_step=1),
        lambda: roll_back(tmp_path / "gone", to_step=1),
    ):
        with pytest.raises(NotFound, match="gone"):
            call()
