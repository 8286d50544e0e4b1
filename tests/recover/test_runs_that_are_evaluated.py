"""A real run with an evaluation beside it that cannot work: the run does not notice."""

import pytest

TRAIN = """
import sys
import torch
import torch.distributed as dist
import holdfast

dist.init_process_group("gloo")
run = holdfast.attach()
state = {"weights": torch.zeros(10)}
with holdfast.Checkpointer(sys.argv[1], every=2) as ckpt:
    for step in range(ckpt.restore(state) + 1, 7):
        run.step(step, loss=1.0)
        ckpt.save(step, state)
dist.destroy_process_group()
"""


@pytest.mark.slow  # a job with torch, and an evaluation that is started twice
def test_an_evaluation_that_fails_costs_the_run_nothing_and_is_said(place):
    folder = place.folder / "checkpoints"
    job = place.ranks(1, place.job(TRAIN), str(folder))
    wish = ["--eval-suite", "a-task", "--eval-option=--no-such-option"]
    code, _, err = place.holdfast("run", "--name", "r", *wish, "--", *job)
    assert code == 0, err
    assert "No such option" in (place.paths("r").logs / "evaluation.log").read_text()
    assert f"the evaluation ended with 2; see {place.paths('r').logs / 'evaluation.log'}." in err
    assert f"holdfast eval watch {folder} --once --suite a-task --run r" in err
