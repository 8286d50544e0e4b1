"""Test the take-over of a run by another node, where the take-over fails half-way."""

import asyncio

import pytest

from holdfast.core.errors import HoldfastError, LedgerError
from holdfast.core.ledger import Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.recover.agent.node import NodeProcess
from holdfast.recover.agent.rendezvous import Meeting
from holdfast.recover.leadership import LeaderWatch, SharedFolder
from holdfast.recover.run_lock import RunLock, is_alive
from holdfast.recover.spec import RunSpec


class Gone:
    """A watch that has found the first node gone."""

    def gone(self, *, is_successor):
        assert not is_successor
        return 1, 0


@pytest.fixture
def node(tmp_path):
    """Return a node of a run whose first node is gone."""
    url, paths = ledger_url(tmp_path), RunPaths(tmp_path, "r")
    run = {"run_id": "r", "state": "running", "command": ["true"], "options": {}, "cwd": "/"}
    with Ledger.open(url) as ledger:
        ledger.add_run(Run(**run, host="h", pid=1, started_at_s=0.0))
    SharedFolder(paths).take("n1", None)
    meeting = Meeting(nnodes=2, key="k", host="127.0.0.1", port=1)
    node = NodeProcess(
        RunSpec(command=("true",), cwd="/", nproc=1, nnodes=2), tmp_path, meeting=meeting
    )
    node._ledger_url, node._paths = url, paths
    return node


async def follow(node):
    try:
        await node._follow(Gone())
    finally:
        node._channel.close()
        node._held.close()


def test_a_take_over_that_fails_leaves_the_run_to_the_next_one(node, monkeypatch):
    def fail(*_args, **_kwargs):
        raise LedgerError("The ledger is away.")

    monkeypatch.setattr(Meeting, "publish", fail)
    with pytest.raises(HoldfastError, match="away"):
        asyncio.run(follow(node))
    assert not is_alive(node._paths.lock), "else no node could ever lead this run"
    RunLock.acquire(node._paths.lock, timeout_s=0.0).release()


def test_a_launcher_that_stood_by_before_is_not_used_after_a_take_over(node, monkeypatch):
    ended = []

    class Standby:
        def kill(self):
            ended.append(self)

    monkeypatch.setattr(Meeting, "publish", lambda *_args, **_kwargs: None)
    node._standby = Standby()
    asyncio.run(follow(node))
    node._supervisor.listening.close()
    assert len(ended) == 1, "it would hold no lock of the run"
    assert node._standby is None
    assert is_alive(node._paths.lock)
    node._lock.release()


def test_a_node_to_which_the_lead_was_handed_over_takes_it_at_once(node, monkeypatch):
    lead = SharedFolder(node._paths)
    lead.beat(1)
    monkeypatch.setattr(Meeting, "publish", lambda *_args, **_kwargs: None)

    async def play(*, is_asked):
        watch = LeaderWatch(lead)
        if is_asked:
            node._from_agent({"kind": "lead"})
        await node._follow(watch)
        return node._supervisor is not None

    async def both():
        try:
            return [await play(is_asked=False), await play(is_asked=True)]
        finally:
            node._channel.close()
            node._held.close()

    assert asyncio.run(both()) == [False, True]
    node._supervisor.listening.close()
    node._lock.release()


def test_a_node_goes_on_where_another_one_takes_over_while_it_looks(node, monkeypatch):
    """The agent finds the next supervisor during the look at the last one's signs of life."""

    async def play():
        looked = asyncio.Event()

        async def found_meanwhile(_watch):
            node._away = None
            looked.set()

        monkeypatch.setattr(node, "_follow", found_meanwhile)
        node._away = (0.0, "refused")
        watching = asyncio.create_task(node._watch_for_supervisor())
        await asyncio.wait(
            [watching, asyncio.ensure_future(looked.wait())], return_when="FIRST_COMPLETED"
        )
        assert not watching.done()
        watching.cancel()
        node._channel.close()
        node._held.close()

    asyncio.run(play())
