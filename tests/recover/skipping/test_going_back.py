"""A run goes back to a healthy state from before all left-out batches, if there is one."""

import asyncio

import pytest
import torch

from holdfast.checkpoint import Checkpointer, scan
from holdfast.core.ledger import Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.recover.attempt import AttemptView
from holdfast.recover.detectors.anomaly import Anomaly
from holdfast.recover.detectors.hang import HangLimits
from holdfast.recover.gate import mark_healthy
from holdfast.recover.losses import Losses
from holdfast.recover.recorder import Recorder
from holdfast.recover.replay.classes import Finding
from holdfast.recover.replay.replays import Replays
from holdfast.recover.skipping.plan import Skip
from holdfast.testing import FakeClock

AGAIN = Finding(kind="data_or_model")


@pytest.fixture
def recorder(tmp_path):
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        begun = {"run_id": "r", "state": "running", "cwd": "/", "host": "h", "pid": 1}
        ledger.add_run(Run(**begun, command=["python"], options={}, started_at_s=0.0))
        paths = RunPaths(tmp_path, "r")
        paths.attempt_logs(1).mkdir(parents=True)
        recorder = Recorder(paths, ledger, FakeClock(), lambda _: None)
        yield recorder
        recorder.close()


def went_back_to(recorder, folder, *, batches, healthy=(50, 100), finding=AGAIN):
    """Have checkpoints at some steps, and a loss that breaks at step 110.

    Return the step that the run goes on from.
    """
    with Checkpointer(folder, every=1, keep=None) as ckpt:
        for step in healthy:
            ckpt.save(step, {"model": torch.nn.Linear(1, 1)})
    replays = Replays(recorder, folder / "steps.jsonl")
    losses = Losses(recorder, FakeClock(), replays, healthy_after=20)
    view = AttemptView.begin(1, HangLimits())
    for saved in scan(folder):
        assert mark_healthy(saved.path, saved.step + 20, 1.0) is None
        losses.saved(view, saved.path, saved.step)
    anomaly = Anomaly(kind="not finite", first_step=110, step=111, value=9.0, batches=batches)
    return asyncio.run(losses.go_back(anomaly, finding))


def test_the_newest_healthy_state_is_taken_where_nothing_earlier_is_left_out(tmp_path, recorder):
    assert went_back_to(recorder, tmp_path / "c", batches=(109, 111)) == 100


def test_an_older_one_is_taken_where_the_range_grows_to_before_the_newest(tmp_path, recorder):
    recorder.leave_out(Skip(first=99, last=130, doublings=1))
    assert went_back_to(recorder, tmp_path / "c", batches=(109, 111)) == 50


def test_the_newest_one_is_taken_where_no_older_one_is_healthy(tmp_path, recorder):
    recorder.leave_out(Skip(first=99, last=130, doublings=1))
    assert went_back_to(recorder, tmp_path / "c", batches=(109, 111), healthy=(100,)) == 100


def test_an_older_one_is_taken_where_the_newest_may_be_damaged(tmp_path, recorder):
    replay = Finding(before_step=100)
    assert went_back_to(recorder, tmp_path / "c", batches=(109, 111), finding=replay) == 50


def test_a_checkpoint_that_is_known_to_be_damaged_is_never_gone_back_to(tmp_path, recorder):
    damaged = Finding(kind="checkpoint", before_step=100)
    folder = tmp_path / "c"
    assert went_back_to(recorder, folder, batches=None, finding=damaged) == 50
    assert [one.step for one in scan(folder) if one.abandoned] == [100]
    only = tmp_path / "d"
    assert went_back_to(recorder, only, batches=None, finding=damaged, healthy=(100,)) is None
