"""Faults that a training script lets happen inside itself."""

import json
import threading
import time

import pytest
import torch

from holdfast.testing import RankFaults
from holdfast.testing.rank_faults import ENV_FOLDER, bad_batches, effect_of, order


@pytest.fixture
def model():
    return torch.nn.Linear(3, 1)


def gradient(model, faults):
    """Make a step, and return the first parameter's gradient."""
    model.zero_grad()
    faults.before_backward(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    return model.weight.grad.clone()


def test_without_an_injector_nothing_happens(model, monkeypatch):
    monkeypatch.delenv(ENV_FOLDER, raising=False)
    faults = RankFaults()
    inputs = torch.ones(2)
    assert faults.batch(1, inputs) is inputs
    assert gradient(model, faults).isfinite().all()


def test_one_gradient_is_nan_and_the_next_is_not(model, tmp_path):
    faults = RankFaults(tmp_path, 0)
    order(tmp_path, 0, 7, "nan")
    assert gradient(model, faults).isnan().all()
    assert effect_of(tmp_path, 7)["pid"] > 0
    assert gradient(model, faults).isfinite().all()


def test_an_order_is_for_one_rank(model, tmp_path):
    order(tmp_path, 1, 1, "nan")
    assert gradient(model, RankFaults(tmp_path, 0)).isfinite().all()
    assert gradient(model, RankFaults(tmp_path, 1)).isnan().all()


def test_bad_batches_stay_bad_in_the_next_attempt(tmp_path):
    order(tmp_path, 0, 1, "bad batch", batches=2)
    numbers = (4, 5, 6, 7)
    for attempt in range(2):
        faults = RankFaults(tmp_path, 0)
        seen = [faults.batch(number, torch.ones(1)).item() for number in numbers[attempt:]]
        assert seen == [1000, 1000, 1, 1][attempt:]
    assert bad_batches(tmp_path, 0) == {4, 5}
    assert bad_batches(tmp_path, 1) == set()
    assert effect_of(tmp_path, 1)["batches"] == [4, 5]


def test_a_slow_rank_is_slow_for_a_while(model, tmp_path, monkeypatch):
    now_s, slept_s = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", slept_s.append)
    faults = RankFaults(tmp_path, 0)
    order(tmp_path, 0, 1, "slow", for_s=5, by_s=0.25)
    for now in (100.0, 104.0, 106.0):
        now_s[0] = now
        faults.before_backward(model.parameters())
    assert slept_s == [0.25, 0.25]


def test_a_deadlocked_rank_never_comes_back(model, tmp_path):
    order(tmp_path, 0, 1, "deadlock")
    faults = RankFaults(tmp_path, 0)
    stuck = threading.Thread(target=faults.before_backward, args=(model.parameters(),), daemon=True)
    stuck.start()
    deadline_s = time.monotonic() + 60
    while effect_of(tmp_path, 1) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    stuck.join(0.05)
    assert stuck.is_alive()


def test_an_order_is_read_whole(tmp_path):
    order(tmp_path, 0, 3, "slow", for_s=1.0, by_s=0.5)
    (path,) = tmp_path.iterdir()
    expected = {"number": 3, "kind": "slow", "for_s": 1.0, "by_s": 0.5}
    assert json.loads(path.read_text()) == expected
