"""Test a session without usable nodes."""

import asyncio
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from holdfast.cluster.placement import Place
from holdfast.core.errors import BadUse
from holdfast.evaluate.coordinator.config import CoordinatorConfig
from holdfast.evaluate.run import session as module
from holdfast.evaluate.run.session import NodesNeeded, Session
from holdfast.evaluate.types.engine import EngineSpec
from holdfast.evaluate.types.suite import Suite, TaskEntry


def made(folder, *, rescore=False, **wanted) -> Session:
    config = CoordinatorConfig(
        evaluation_id="e", suite=Suite(name="s", entries=(TaskEntry(name="a", harness="nearly"),)), spec=EngineSpec(),
        engines_per_node=1, nodes=1, folder=str(folder), journals=str(folder), rescore=rescore,
    )  # fmt: skip
    return Session(config, NodesNeeded(**wanted), lambda _message: None)


@pytest.fixture
def asked(monkeypatch) -> Iterator[dict]:
    """Record the requests for nodes, which all fail."""
    asked = {}

    def address_host():
        asked["address"] = True
        raise BadUse("No more.")

    def places(on, **how):
        asked.update(on=on, **how)
        return SimpleNamespace(address_host=address_host)

    monkeypatch.setattr(module, "places", places)
    return asked


def test_a_wrong_task_is_found_before_others_nodes_are_had(tmp_path, asked):
    with pytest.raises(BadUse, match="There is no harness 'nearly'"):
        asyncio.run(made(tmp_path, on="slurm").run())
    assert "address" not in asked
    with pytest.raises(BadUse, match="No more"):
        asyncio.run(made(tmp_path, on="local").run())


def test_gpus_are_asked_for_where_engines_run(tmp_path, asked, caplog):
    for rescore, gpus in ((False, 8), (True, 0)):
        caplog.clear()
        session = made(tmp_path, gpus_per_node=8, note="Mind this.", rescore=rescore)
        with pytest.raises(BadUse, match="No more"):
            asyncio.run(session.run())
        assert asked["gpus_per_node"] == gpus
        assert ("Mind this." in caplog.text) is not rescore


def test_why_nodes_do_not_come_is_said_once_and_not_at_once(tmp_path, monkeypatch, caplog):
    polls, now_s = [], [0.0]

    class Placement:
        def poll(self):
            polls.append(list(caplog.messages))
            if len(polls) == 6:
                raise BadUse("No more.")
            now_s[0] += 4.0
            whys = ["Ray has 0 nodes"] * 2 + [""] if len(polls) < 5 else ["Ray has 1 node"] * 2
            return [Place(index=index, state="waiting", why=why) for index, why in enumerate(whys)]

    monkeypatch.setattr(module, "_POLL_S", 0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with caplog.at_level(logging.WARNING), pytest.raises(BadUse, match="No more"):
        asyncio.run(made(tmp_path, nodes=3)._mind(Placement()))
    assert polls[2] == []  # after 8 s
    assert polls[3] == polls[4] == ["Waiting for nodes: Ray has 0 nodes."]
    assert polls[5] == ["Waiting for nodes: Ray has 0 nodes.", "Waiting for nodes: Ray has 1 node."]
