"""The supervisor's looks at the ranks' processes, with the time of a fake clock."""

import asyncio
import os
from dataclasses import replace

from holdfast.core.ledger import Ledger
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.recover import policy, supervisor
from holdfast.recover.channel import Peer
from holdfast.recover.spec import RunSpec
from holdfast.testing import FakeClock

RANK = Peer(role="rank", attempt=0, rank=0, local_rank=0, world_size=1, pid=os.getpid())


def test_a_look_that_takes_long_is_no_standstill_of_the_supervisor(tmp_path, monkeypatch):
    clock = FakeClock()
    waited = asyncio.sleep

    async def sleep(seconds):
        clock.advance(seconds)
        await waited(0)

    async def look(pids):
        clock.advance(supervisor.STANDSTILL_S + 0.5)
        return dict.fromkeys(pids, (1.0, 1))

    monkeypatch.setattr(asyncio, "sleep", sleep)
    spec = RunSpec(command=("true",), cwd=str(tmp_path))
    watching = supervisor.Supervisor(
        spec,
        RunPaths(tmp_path, "r"),
        Ledger.open(ledger_url(tmp_path)),
        token="x",
        generation=1,
        clock=clock,
    )
    monkeypatch.setattr(watching._nodes, "look", look)
    watching.states({0: "disk-sleep"})
    watching._conduct.state = replace(watching._conduct.state, phase=policy.Phase.RUNNING)
    for message in (
        {"kind": "hello"},
        {"kind": "watch"},
        {"kind": "step", "step": 1, "step_s": 0.1},
    ):
        watching._view.heard(RANK, message, clock.monotonic_s())
    began_s, told = clock.monotonic_s(), []

    async def until_frozen():
        ticking = asyncio.create_task(watching._tick_forever())
        while not any(isinstance(event, policy.JobFrozen) for event in told):
            assert clock.monotonic_s() - began_s < 1200
            assert not ticking.done()
            await waited(0.001)  # the look is in another thread
        ticking.cancel()

    monkeypatch.setattr(watching, "_tell", told.append)
    asyncio.run(until_frozen())
    assert clock.monotonic_s() - began_s < 2 * spec.hangs.floor_s
    watching._conduct.close()
    watching._recorder.close()
