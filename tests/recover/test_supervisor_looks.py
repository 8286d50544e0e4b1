"""The supervisor's looks at the ranks' processes, with the time of a fake clock."""

import asyncio
import os
from dataclasses import replace

import pytest

from holdfast.core.ledger import Ledger
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.recover import policy, supervisor
from holdfast.recover.channel import Peer
from holdfast.recover.detectors.hang import HangLimits
from holdfast.recover.spec import RunSpec
from holdfast.testing import FakeClock

WAITED = asyncio.sleep
RANK = Peer(role="rank", attempt=0, rank=0, local_rank=0, world_size=1, pid=os.getpid())


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that moves by each sleep, which takes no time."""
    clock = FakeClock()

    async def sleep(seconds):
        clock.advance(seconds)
        await WAITED(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return clock


@pytest.fixture
def watching(tmp_path, clock):
    """Return the supervisor of a run whose one rank has made a step and waits for its disk."""
    watching = supervisor.Supervisor(
        RunSpec(command=("true",), cwd=str(tmp_path)),
        RunPaths(tmp_path, "r"),
        Ledger.open(ledger_url(tmp_path)),
        token="x",
        generation=1,
        clock=clock,
    )
    watching.states({0: "disk-sleep"})
    watching._conduct.state = replace(watching._conduct.state, phase=policy.Phase.RUNNING)
    for message in (
        {"kind": "hello"},
        {"kind": "watch"},
        {"kind": "step", "step": 1, "step_s": 0.1},
    ):
        watching._view.on_message(RANK, message, clock.monotonic_s())
    yield watching
    watching._conduct.close()
    watching._recorder.close()


def test_a_look_that_takes_long_is_no_standstill_of_the_supervisor(watching, clock, monkeypatch):
    async def look(pids):
        clock.advance(supervisor.STANDSTILL_S + 0.5)
        return dict.fromkeys(pids, (1.0, 1))

    monkeypatch.setattr(watching._nodes, "look", look)
    began_s, told = clock.monotonic_s(), []

    async def until_frozen():
        ticking = asyncio.create_task(watching._tick_forever())
        while not any(isinstance(event, policy.JobFrozen) for event in told):
            assert clock.monotonic_s() - began_s < 1200
            assert not ticking.done()
            await WAITED(0.001)  # the look is in another thread
        ticking.cancel()

    monkeypatch.setattr(watching, "_decide_on", told.append)
    asyncio.run(until_frozen())
    assert clock.monotonic_s() - began_s < 2 * HangLimits().floor_s


def test_nodes_are_watched_while_a_look_has_no_answer(watching, clock, monkeypatch):
    ticks, looks = [], []

    async def look(pids):
        looks.append(len(ticks))
        await asyncio.Event().wait()

    async def tick():
        ticks.append(clock.monotonic_s())

    monkeypatch.setattr(watching._nodes, "look", look)
    monkeypatch.setattr(watching._nodes, "tick", tick)

    async def until_ticks():
        ticking = asyncio.create_task(watching._tick_forever())
        while not looks or len(ticks) < looks[0] + 50:
            assert clock.monotonic_s() < 3600, "the node of the look is never lost"
            assert not ticking.done()
            await WAITED(0)
            clock.advance(0.01)
        ticking.cancel()

    asyncio.run(until_ticks())
    assert len(looks) == 1, "one look at a time"
