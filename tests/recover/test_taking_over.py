"""Test the take-over of a run by another node, where the take-over fails half-way."""

import asyncio

import pytest

from holdfast.core.errors import HoldfastError, LedgerError
from holdfast.core.ledger import Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.recover.agent.node import Node
from holdfast.recover.agent.rendezvous import Meeting
from holdfast.recover.leadership import SharedFolder
from holdfast.recover.run_lock import RunLock, is_alive
from holdfast.recover.spec import RunSpec


class Gone:
    """A watch that has found the first node gone."""

    def gone(self):
        return 1, 0


def test_a_take_over_that_fails_leaves_the_run_to_the_next_one(tmp_path, monkeypatch):
    url, paths = ledger_url(tmp_path), RunPaths(tmp_path, "r")
    run = {"run_id": "r", "state": "running", "command": ["true"], "options": {}, "cwd": "/"}
    with Ledger.open(url) as ledger:
        ledger.add_run(Run(**run, host="h", pid=1, started_at_s=0.0))
    SharedFolder(paths).take("n1", None)
    meeting = Meeting(nnodes=2, key="k", host="127.0.0.1", port=1)
    node = Node(RunSpec(command=("true",), cwd="/", nproc=1, nnodes=2), tmp_path, meeting=meeting)
    node._ledger_url, node._paths = url, paths

    def fail(*_args, **_kwargs):
        raise LedgerError("The ledger is away.")

    monkeypatch.setattr(Meeting, "publish", fail)

    async def follow():
        try:
            await node._follow(Gone())
        finally:
            node._channel.close()
            node._held.close()

    with pytest.raises(HoldfastError, match="away"):
        asyncio.run(follow())
    assert not is_alive(paths.lock), "else no node could ever lead this run"
    RunLock.acquire(paths.lock, timeout_s=0.0).release()
