"""The plan of the demonstration's faults, and what becomes of them in its table."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from holdfast.core.errors import BadUse
from holdfast.demo.faults import (
    FIRST_INTERVAL,
    INJECTED,
    KINDS,
    MARGIN_STEPS,
    PlannedFault,
    PlannedFaults,
    plan_faults,
)

EVERY = 12


@pytest.mark.parametrize("seed", range(20))
def test_each_kind_strikes_once_between_two_saves_of_its_own(seed):
    plan = plan_faults(seed, steps=96, save_every=EVERY, world_size=2)
    assert sorted(fault.kind for fault in plan) == sorted(KINDS)
    intervals = [fault.step // EVERY for fault in plan]
    assert intervals == sorted(set(intervals))
    assert intervals[0] >= FIRST_INTERVAL
    assert intervals[-1] < 96 // EVERY - 1
    for fault in plan:
        assert MARGIN_STEPS <= fault.step % EVERY < EVERY - MARGIN_STEPS
        if fault.kind in ("Bad node", "Loss became NaN"):
            assert fault.rank == 1


def test_seeds_differ_and_a_seed_repeats():
    plans = [
        tuple(plan_faults(seed, steps=168, save_every=EVERY, world_size=2)) for seed in (1, 1, 2)
    ]
    assert plans[0] == plans[1] != plans[2]


def test_too_few_steps_are_refused_with_the_number_that_suffices():
    with pytest.raises(BadUse, match="--steps 72 leaves no room for 5 faults: give at least 96"):
        plan_faults(0, steps=72, save_every=EVERY, world_size=2)


def test_a_fault_strikes_once_when_its_step_is_reached(monkeypatch):
    """A damaged batch is of the script: the rank may have ended before the report of its step."""
    broken = []
    plan = [
        PlannedFault(kind="Loss became NaN", rank=1, step=5),
        PlannedFault(kind="Bad node", rank=1, step=9),
    ]
    injector = PlannedFaults(plan, None, break_link=broken.append)
    monkeypatch.setenv("HOLDFAST_NODE_NAME", "here")
    pids = {0: os.getpid(), 1: os.getpid()}
    assert injector.stepped(4, pids) is None
    told = injector.stepped(5, {})
    assert (told["fault"], told["rank"], told["step"]) == ("Loss became NaN", 1, 5)
    assert "batch 6" in told["detail"]
    assert injector.stepped(5, pids) is None
    assert broken == []
    assert injector.stepped(10, {0: os.getpid()}) is None, "its rank has no process yet"
    assert injector.stepped(10, pids)["fault"] == "Bad node"
    assert broken == ["this host"]
    assert injector.stepped(11, pids) is None


def test_the_bad_node_is_the_one_that_the_rank_runs_on_now():
    """A replay of a broken loss moves ranks to other nodes."""
    broken = []
    plan = [PlannedFault(kind="Bad node", rank=1, step=1)]
    injector = PlannedFaults(plan, None, break_link=broken.append)
    code = "import signal; print(flush=True); signal.pause()"
    command = [sys.executable, "-S", "-c", code]
    environment = {**os.environ, "HOLDFAST_NODE_NAME": "node3"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as rank:
        try:
            rank.stdout.readline()
            told = injector.stepped(1, {1: rank.pid})
        finally:
            rank.kill()
    assert broken == [told["node"]] == ["node3"]


class Public:
    """The public injector: the first fault finds nothing to strike."""

    def __init__(self):
        self.asked = []

    def inject(self, kind, *, rank):
        self.asked.append((kind, rank))
        at_s = None if len(self.asked) == 1 else 1.0
        return SimpleNamespace(took_effect_at_s=at_s, node="n2", pid=7, detail="bit 3 was flipped")


@pytest.mark.parametrize("kind", sorted(INJECTED))
def test_processes_and_checkpoints_are_struck_by_the_public_injector(kind):
    public = Public()
    planned = PlannedFaults(
        [PlannedFault(kind=kind, rank=1, step=5)], public, break_link=pytest.fail
    )
    pids = {1: os.getpid()}
    assert planned.stepped(5, pids) is None, "nothing was struck: again at the next step"
    told = planned.stepped(6, pids)
    assert (told["fault"], told["step"]) == (kind, 6)
    assert "rank 1 on n2 (pid 7)" in told["detail"]
    assert public.asked == [(INJECTED[kind], 1)] * 2
    assert planned.stepped(7, pids) is None
