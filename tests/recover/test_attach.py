"""The rank's side alone: outside supervision, and with wrong arguments."""

import math
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from holdfast.core.errors import BadUse
from holdfast.core.link import take_batches
from holdfast.recover.attach import WAITING_STEPS, Run, _Link, _number, _record_phases
from holdfast.recover.channel import encode


def test_outside_supervision_every_call_works_and_nobody_listens():
    script = (
        "import holdfast\nrun = holdfast.attach()\nassert run is holdfast.attach()\nassert not run.supervised\n"
        "run.step(1, loss=0.5, lr=1e-3)\nwith run.section('evaluate', limit_s=3):\n    pass\n"
        "run.emit('note', {'a': 1})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
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
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_the_processes_around_a_rank_import_only_what_they_need():
    script = """
import sys
import holdfast.recover.launching.guard, holdfast.recover.shim.rank_shim
print([one for one in sys.modules if one.startswith(("torch", "sqlalchemy", "psutil", "holdfast.profile."))])
import holdfast.cli.run.command
print([one for one in sys.modules if one.startswith(("holdfast.diagnose", "sqlalchemy.dialects.postgresql"))])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n[]\n"


class _Sent:
    """A stand-in for the channel: keeps all messages, and refuses only those that fit no line."""

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
    run.step(
        np.int64(3), loss=np.float32(0.5), value=torch.tensor(2.0, requires_grad=True), odd=math.nan
    )
    (step,) = flushed(run, sent)
    assert (step["step"], step["loss"], step["metrics"]) == (3, 0.5, {"value": 2.0, "odd": "nan"})


def test_a_step_has_the_batches_since_the_step_before(run, sent):
    take_batches()
    batches = run.batches(range(9))
    batches.state_dict()
    iterator = iter(batches)
    for step, count in enumerate((1, 2, 0), 1):
        for _ in range(count):
            next(iterator)
        run.step(step, loss=1.0)
    told = [message["batches"] for message in flushed(run, sent)]
    assert [one and list(one) for one in told] == [[1, 1], [2, 3], None]


def test_batches_whose_position_is_not_saved_are_not_reported(run, sent):
    """No later attempt could find them by their numbers."""
    take_batches()
    batches = run.batches(range(9))
    for step, _ in enumerate(batches, 1):
        run.step(step, loss=1.0)
        if step == 2:
            batches.state_dict()
        if step == 4:
            break
    assert [one["batches"] and list(one["batches"]) for one in flushed(run, sent)][-4:] == [
        None,
        None,
        [3, 3],
        [4, 4],
    ]


def test_batches_of_a_second_call_would_be_counted_anew_and_are_refused(run):
    run.batches(range(3))
    for _ in run.batches(range(3)):  # of the first ones none was given
        pass
    with pytest.raises(BadUse, match="Call it once, before the first epoch"):
        run.batches(range(3))


def test_without_a_supervisor_a_second_training_in_the_process_may_have_its_batches(caplog):
    unsupervised = Run(None)
    assert list(unsupervised.batches(range(3))) == [0, 1, 2]
    assert not caplog.text
    assert list(unsupervised.batches(range(3))) == [0, 1, 2]
    assert "Call it once, before the first epoch" in caplog.text


@pytest.mark.parametrize(
    "bad",
    [
        {"loss": "high"},
        {"loss": torch.ones(2)},
        {"m": object()},
        {f"m{number}": 1.0 for number in range(9000)},
    ],
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


SIGNALLED = """
import os, queue, signal, subprocess, sys, threading
from holdfast.core.link import Unsupervised, job_link, set_job_link
from holdfast.recover.attach import _Link

class Client:
    def __init__(self):
        self.sent, self.orders = queue.SimpleQueue(), queue.SimpleQueue()

    def send(self, message):
        self.sent.put(message["kind"])

    def receive(self):
        return self.orders.get()

    def give_up(self):
        pass

client = Client()
link = _Link(client)
set_job_link(link)
link.hold_sigterm()
assert signal.getsignal(signal.SIGTERM) == link._sigterm

def own(number, frame):
    global calls
    calls += 1
    if callable(before):
        before(number, frame)

calls = 0
before = None
"""


def signalled(script):
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED + script],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.stderr == ""
    return done.returncode


def test_a_handler_that_the_script_sets_later_is_not_overwritten():
    assert (
        signalled("""
from holdfast.checkpoint.integrations.reporting import Reporter
signal.signal(signal.SIGTERM, own)
Reporter().begin(0)
link.take_back_sigterm([own])
os.kill(os.getpid(), signal.SIGTERM)
assert (calls, signal.getsignal(signal.SIGTERM)) == (1, own)
assert client.sent.get(timeout=240) == "watch"
link.take_back_sigterm([own, link._sigterm])
assert signal.getsignal(signal.SIGTERM) == link._sigterm, "as a trainer's handler that calls it is"
os._exit(0)
""")
        == 0
    )


@pytest.mark.parametrize("told_first", [True, False])
def test_a_handler_that_calls_the_one_before_it_loses_no_signal(told_first):
    """The supervisor's `terminate` ends the rank, whether the signal or the message comes first."""
    told = """
client.orders.put({"kind": "terminate"})
while not link._acts_on_sigterm:
    threading.Event().wait(0.01)
"""
    got = "os.kill(os.getpid(), signal.SIGTERM)\n"
    wait = "threading.Event().wait(50)\n"
    script = "before = signal.signal(signal.SIGTERM, own)\n"
    first = (
        told + got
        if told_first
        else got + 'assert client.sent.get(timeout=240) == "sigterm"\n' + told
    )
    assert signalled(script + first + wait) == -signal.SIGTERM


def test_a_process_that_lost_the_place_goes_on_without_a_supervisor():
    displaced = """
client.orders.put({"kind": "displaced"})
while not isinstance(job_link(), Unsupervised):
    threading.Event().wait(0.01)
"""
    assert signalled(displaced + "os._exit(3)") == 3
    ended = (
        "while True:\n    os.kill(os.getpid(), signal.SIGTERM)\n    threading.Event().wait(0.1)\n"
    )
    assert signalled(displaced + ended) == -signal.SIGTERM
    held = (
        'os.kill(os.getpid(), signal.SIGTERM)\nassert client.sent.get(timeout=240) == "sigterm"\n'
    )
    assert signalled(held + displaced + "threading.Event().wait(50)") == -signal.SIGTERM


def test_a_child_of_multiprocessing_does_not_connect_by_itself():
    script = """
import importlib, multiprocessing, os
attach = importlib.import_module("holdfast.recover.attach")

def connects():
    attach._connect = lambda **_: os._exit(7)
    attach.connect_quietly()

child = multiprocessing.get_context("fork").Process(target=connects)
child.start()
child.join()
assert child.exitcode == 0, child.exitcode
connects()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=240
    )
    assert (done.returncode, done.stderr) == (7, "")


def test_a_loop_that_outruns_the_channel_still_reports_its_last_step():
    """Without a reader, reports beyond a bound are skipped, but not the newest, and no event."""
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


def test_a_rank_whose_profile_cannot_begin_attaches_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_PROFILE", str(tmp_path))
    monkeypatch.setenv("RANK", "%(rank)s")

    _record_phases()

    assert not list(tmp_path.iterdir())
