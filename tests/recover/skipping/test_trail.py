"""The batches that led to a broken loss, from what the ranks report."""

import pytest
import torch

from holdfast.core.left_out import LeftOut
from holdfast.recover.detectors.anomaly import AnomalyDetector
from holdfast.recover.skipping.plan import Skipping
from holdfast.recover.skipping.trail import Trail


def trail(*reports, rank=0):
    """Reports of (step, first, last, has a loss)."""
    found = Trail()
    for step, first, last, has_loss in reports:
        loss = 1.0 if has_loss else None
        found.took(rank, {"step": step, "loss": loss, "batches": [first, last]})
    return found


def test_it_is_the_batches_from_the_last_ordinary_step_to_the_step_of_certainty():
    found = trail(*((step, step + 10, step + 10, True) for step in range(1, 40)))
    assert found.leading_to(0, 35, 37) == (44, 47)


def test_a_step_may_have_several_batches():
    found = trail(*((step, 4 * step - 3, 4 * step, True) for step in range(1, 40)))
    assert found.leading_to(0, 35, 37) == (4 * 34 - 3, 4 * 37)


def test_steps_without_a_loss_belong_to_the_next_one_that_has_a_loss():
    found = trail(*((step, step, step, step % 5 == 0) for step in range(1, 60)))
    assert found.leading_to(0, 45, 55) == (40, 55)


def test_where_an_attempt_begins_with_a_broken_loss_its_first_batch_is_the_start():
    assert trail((31, 31, 32, True), (32, 33, 33, True)).leading_to(0, 31, 32) == (31, 33)


def test_what_is_not_known_is_not_made_up():
    found = trail((1, 1, 1, True), (2, 2, 2, True))
    assert found.leading_to(1, 1, 2) is None, "of another rank"
    found.restarted()
    assert found.leading_to(0, 1, 2) is None
    found.took(0, {"step": 1, "loss": 1.0})
    found.took(0, {"step": 2, "loss": 1.0, "batches": None})
    assert found.leading_to(0, 1, 2) is None, "the script does not use run.batches"
    counted_anew = trail((1, 80, 80, True), (2, 1, 1, True))
    assert counted_anew.leading_to(0, 2, 2) is None


@pytest.mark.parametrize(
    "batches", [[1], [1, 2, 3], [2, 1], [0, 1], ["1", 2], [1.5, 2], [True, 2], 7, [1, 2**60]]
)
def test_malformed_batches_are_refused(batches):
    with pytest.raises((TypeError, ValueError)):
        Trail().took(0, {"step": 1, "loss": 1.0, "batches": batches})


def broken_by(left_out, *, poisoned, scale):
    """Train a small network on batches, one of which is poisoned.

    Return those that led to a broken loss.
    """
    detector, found = AnomalyDetector(), Trail()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer, step = torch.optim.SGD(model.parameters(), lr=0.01), 0
    for number in range(1, poisoned + 40):
        if number in left_out:
            continue
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        if number == poisoned:
            inputs[0] *= scale
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean() + 0.1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        found.took(0, {"step": step, "loss": loss.item(), "batches": [number, number]})
        anomaly = detector.look(0, step, loss.item(), leads=True)
        if anomaly is not None:
            return found.leading_to(0, anomaly.first_step, anomaly.step)
    return None


@pytest.mark.parametrize("scale", [1e3, 3e3, 1e4, 1e6, 1e30])
@pytest.mark.parametrize("poisoned", [110, 30], ids=["with a level", "in the warm-up"])
def test_a_poisoned_batch_is_left_out_however_the_loss_explodes(poisoned, scale):
    """The loss may be huge for some steps before it is not finite."""
    skip = Skipping().next_skip(broken_by(LeftOut(), poisoned=poisoned, scale=scale))
    assert skip is not None
    assert poisoned - 3 <= skip.first <= poisoned <= skip.last <= poisoned + 5
    left_out = LeftOut.of([(skip.first, skip.last)])
    assert broken_by(left_out, poisoned=poisoned, scale=scale) is None
