"""The rank's side by itself: outside supervision, and what it refuses."""

import math
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from holdfast.core.errors import BadUse
from holdfast.recover.attach import WAITING_STEPS, Run, _Link, _number
from holdfast.recover.channel import encode


def test_outside_supervision_every_call_works_and_nobody_listens():
    script = (
        "import holdfast\nrun = holdfast.attach()\nassert run is holdfast.attach()\nassert not run.supervised\n"
        "run.step(1, loss=0.5, lr=1e-3)\nwith run.section('evaluate', limit_s=3):\n    pass\n"
        "run.emit('note', {'a': 1})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("step", [-1, 1.0, "1", None, True, torch.tensor(1.0), torch.tensor(True)])
def test_a_step_is_a_whole_number(step):
    with pytest.raises(BadUse, match="whole number"):
        Run(None).step(step)


def test_numbers_that_json_lacks_are_words():
    assert [_number(value) for value in (None, 1, 2.5, math.nan, math.inf, -math.inf)] == [
        None,
        1.0,
        2.5,
        "nan",
        "inf",
        "-inf",
    ]


def test_attach_imports_neither_torch_nor_the_ledger():
    heavy = "{'torch', 'sqlalchemy', 'psutil', 're2'}"
    script = f"import sys, holdfast; holdfast.attach(); print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


class _Sent:
    """Stands in for the channel: keeps what is sent, refuses nothing but what cannot be a line."""

    def __init__(self):
        self.messages = []

    def send(self, message):
        encode(message)
        self.messages.append(message)

    def receive(self):
        threading.Event().wait()


@pytest.fixture
def sent():
    return _Sent()


@pytest.fixture
def run(sent):
    return Run(_Link(sent))


def flushed(run, sent):
    run._link._flush()
    return sent.messages


def test_numbers_of_every_kind_are_taken(run, sent):
    run.step(np.int64(3), loss=np.float32(0.5), value=torch.tensor(2.0, requires_grad=True), odd=math.nan)
    (step,) = flushed(run, sent)
    assert (step["step"], step["loss"], step["metrics"]) == (3, 0.5, {"value": 2.0, "odd": "nan"})


@pytest.mark.parametrize(
    "bad", [{"loss": "high"}, {"loss": torch.ones(2)}, {"m": object()}, {f"m{number}": 1.0 for number in range(9000)}]
)
def test_a_step_arrives_whatever_its_numbers_are(run, sent, bad):
    run.step(5, **bad)
    run.step(6, loss=1.0)
    first, told, second = flushed(run, sent)
    assert (first["step"], first["loss"], first["metrics"]) == (5, None, {})
    assert told["event"] == "not_sent"
    assert second["loss"] == 1.0


def test_an_event_that_does_not_fit_is_told_of(run, sent):
    run.emit("big", {"x": "y" * 100_000})
    (told,) = flushed(run, sent)
    assert (told["event"], told["data"]["kind"]) == ("not_sent", "event")


def test_a_save_within_an_evaluation_leaves_it_open_with_its_own_limit(run, sent):
    with run.section("evaluate", limit_s=50), run.section("save"):
        pass
    edges = [(one["name"], one["open"], one["limit_s"]) for one in flushed(run, sent)]
    assert edges == [
        ("evaluate", True, 50),
        ("save", True, None),
        ("evaluate", True, 50),
        ("evaluate", False, None),
    ]


def test_a_loop_that_outruns_the_channel_still_reports_its_last_step():
    """While nothing is taken, reports beyond a bound are skipped, never the newest one nor an event."""
    go_on = threading.Event()

    class Slow(_Sent):
        def send(self, message):
            go_on.wait(30)
            self.messages.append(message)

    slow = Slow()
    run = Run(_Link(slow))
    last = 2 * WAITING_STEPS
    for step in range(1, last + 1):
        run.step(step)
    run.emit("note", {})
    go_on.set()
    told = flushed(run, slow)
    steps = [one["step"] for one in told if one["kind"] == "step"]
    assert steps[-1] == last
    assert len(steps) <= WAITING_STEPS + 2
    assert [one["event"] for one in told if one["kind"] == "event"] == ["note"]
