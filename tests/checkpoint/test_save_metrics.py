"""Test metrics that a save records on its checkpoint, and their use."""

import json
import threading
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint import Best, Checkpointer, Retention
from holdfast.checkpoint.catalog.annotations import pin, read_marks
from holdfast.checkpoint.catalog.catalog import scan
from holdfast.checkpoint.catalog.pruning import prune
from holdfast.checkpoint.format.paths import step_path
from holdfast.checkpoint.ipc.save_request import SaveRequest
from holdfast.core import link
from holdfast.core.errors import BadUse
from holdfast.recover.attach import Run

STATE = {"t": torch.ones(3)}


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch):
    monkeypatch.setattr(link, "_numbers", (-1, {}))


def metrics_of(folder):
    return {info.step: dict(info.marks.metrics) for info in scan(folder)}


def test_they_are_on_the_checkpoint_as_it_appears_and_it_stays_by_them(tmp_path):
    with Checkpointer(
        tmp_path, keep=Retention(last=1, best=(Best(metric="loss", count=1, mode="min"),))
    ) as ckpt:
        for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75), (4, 1)):
            ckpt.save(step, STATE, metrics={"loss": loss}).result()
    assert metrics_of(tmp_path) == {2: {"loss": 0.25}, 4: {"loss": 1.0}}
    assert Checkpointer(tmp_path).best_step("loss") == 2


def test_those_of_the_step_that_was_reported_are_taken(tmp_path):
    run = Run(None)
    with Checkpointer(tmp_path, keep=None) as ckpt:
        run.step(1, loss=torch.tensor(0.5, requires_grad=True), accuracy=0.9)
        ckpt.save(1, STATE).result()
        ckpt.save(2, STATE).result()  # never reported
        run.step(3, loss=0.25, steps_per_s=float("inf"), who="me")
        ckpt.save(3, STATE).result()
        run.step(4, loss=0.125)
        ckpt.save(4, STATE, metrics={"val_loss": 2}).result()
        run.step(5)
        ckpt.save(5, STATE).result()
    found = metrics_of(tmp_path)
    assert found == {
        1: {"loss": 0.5, "accuracy": pytest.approx(0.9)},
        2: {},
        3: {"loss": 0.25},
        4: {"val_loss": 2},
        5: {},
    }
    best = Retention(best=(Best(metric="loss", count=1, mode="min"),))
    prune(tmp_path, best, by="test", now_s=1.0)
    assert set(metrics_of(tmp_path)) == {3, 5}


def test_they_are_read_in_a_thread_beside_the_training(tmp_path):
    read_by = []

    class Loss:
        def __float__(self):
            read_by.append(threading.current_thread())
            return 0.5

    with Checkpointer(tmp_path) as ckpt:
        Run(None).step(1, loss=Loss())
        ckpt.save(1, STATE).result()
    assert metrics_of(tmp_path) == {1: {"loss": 0.5}}
    assert read_by
    assert threading.main_thread() not in read_by


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        ({"loss": float("nan")}, "metrics has nan as 'loss'"),
        ({"loss": "0.5"}, "metrics has '0.5' as 'loss'"),
        ({"loss": None}, "metrics has None as 'loss'"),
        ({"loss": 10**400}, "as 'loss'; allowed is a finite number"),
        ({"loss": torch.ones(2)}, r"metrics has a \(2,\) tensor as 'loss'"),
        ({"": 1.0}, "metrics has a name ''"),
        ({1: 1.0}, "metrics has a name 1"),
        ({str(number): 1.0 for number in range(101)}, "allowed is a dict of at most 100"),
        ([("loss", 1.0)], "metrics is list"),
    ],
)
def test_what_is_no_metric_is_refused_before_anything_is_saved(tmp_path, metrics, named):
    with Checkpointer(tmp_path, every=2) as ckpt, pytest.raises(BadUse, match=named):
        ckpt.save(1, STATE, metrics=metrics)


def test_a_tensor_that_is_not_finite_is_left_out(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(
            1, STATE, metrics={"loss": torch.tensor(float("nan")), "a": torch.tensor([2])}
        ).result()
    assert metrics_of(tmp_path) == {1: {"a": 2.0}}


def test_a_step_that_is_saved_again_has_its_own_and_keeps_its_pin(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, STATE, metrics={"loss": 1.0, "old": 1.0}).result()
        pin(step_path(tmp_path, 1), by="test", now_s=1.0)
        ckpt.save(1, STATE, metrics={"loss": 2.0}).result()
    marks = read_marks(step_path(tmp_path, 1))
    assert marks.metrics == {"loss": 2.0}
    assert marks.pinned is not None


def test_an_order_brings_them_to_the_writing_process():
    order = SaveRequest(
        folder=Path("/f"),
        step=1,
        save="a-1",
        created_at_s=1.0,
        keep=Retention(),
        metrics={"loss": 0.5},
    )
    told = json.loads(json.dumps(order.as_json()))
    assert SaveRequest.of_json(told) == order
    del told["metrics"]
    assert SaveRequest.of_json(told).metrics == {}
