"""Test a node's agent with a coordinator that records its messages, for failing models."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash

from holdfast.checkpoint.format.checksums import whole_checksum
from holdfast.evaluate.run.node_agent import Agent, NodeOptions
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.model_manifest import Chunk, ModelFile, ModelManifest
from holdfast.evaluate.weights import store
from holdfast.evaluate.wire import messages
from holdfast.evaluate.wire.server import listen

TOKEN = "of the test"
SIZE = 40_000


class Recorder:
    """Send one agent the test's orders, one after each message about a model."""

    def __init__(self, *orders):
        self.orders, self.heard_of, self.report = list(orders), [], None

    def joined(self, peer):
        peer.send(messages.Welcome())

    def on_message(self, peer, message):
        if isinstance(message, messages.NodeReport):
            self.report = message
        elif isinstance(message, messages.ModelFetched | messages.FetchFailed):
            self.heard_of.append(message)
        else:
            return
        while self.orders:
            order = self.orders.pop(0)
            if order is None:  # until the next message about a model
                return
            peer.send(order)
        peer.send(messages.Stop())

    def gone(self, peer):
        pass

    def broke(self, error):
        raise error


@pytest.fixture
def models(tmp_path):
    folder = tmp_path / "models"
    for number in range(2):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "a").write_bytes(os.urandom(SIZE))
    return folder


def fetch(
    models: Path, number: int, *, folder: str | None = None, digest: str = ""
) -> messages.FetchModel:
    manifest = ModelManifest(
        source=str(models / (folder or str(number))),
        form="huggingface",
        files=[ModelFile(path="a", size_bytes=SIZE)],
        chunks=[Chunk(file=0, offset=0, size_bytes=SIZE)],
        digests=[digest] if digest else [],
    )
    return messages.FetchModel(model=number, manifest=manifest, owners=[0], peers={})


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """Return a function that runs an agent through orders, with exit code and coordinator."""
    monkeypatch.setattr(
        "holdfast.evaluate.run.node_agent.kill_descendants", lambda: None
    )  # other tests' processes

    def run(*orders, **options):
        async def scenario():
            recorder = Recorder(*orders)
            server = await listen("127.0.0.1", 0, TOKEN, recorder)
            port = server.sockets[0].getsockname()[1]
            said = {"store_root": str(tmp_path / "memory"), "store_bytes": SIZE * 3 // 2, **options}
            given = NodeOptions(place=0, folder=tmp_path, journals=tmp_path, has_host=False, **said)
            async with asyncio.timeout(240.0):
                code = await Agent(options=given, token=TOKEN, address=f"127.0.0.1:{port}").run()
            server.close()
            for _ in range(10):  # both ends of the line close in turn
                await asyncio.sleep(0)
            return code, recorder

        return asyncio.run(scenario())

    return run


def test_a_model_that_does_not_fit_names_those_that_lie_there(agent, models):
    code, said = agent(
        fetch(models, 0),
        None,
        fetch(models, 1),
        None,
        messages.ReleaseModel(model=0),
        fetch(models, 1),
        None,
    )
    has, full, then = said.heard_of
    assert code == 0
    assert (has.model, full.model, full.beside, full.final) == (0, 1, [0], False)
    assert "is full" in full.why
    assert isinstance(then, messages.ModelFetched), "it fits when the other was released"
    assert then.model == 1


def test_a_model_that_fits_into_no_empty_memory_names_none(agent, models):
    _, said = agent(fetch(models, 0), None, store_bytes=SIZE // 2)
    (full,) = said.heard_of
    assert (full.beside, full.final) == ([], False)
    assert "Mount a larger" in full.why


def test_a_damaged_model_is_one_for_all(agent, models):
    _, said = agent(
        fetch(models, 0, digest=whole_checksum(xxhash.xxh3_128(b"another").hexdigest())), None
    )
    (damaged,) = said.heard_of
    assert damaged.final
    assert "damaged" in damaged.why


def test_a_source_that_this_node_cannot_read_may_be_another_nodes(agent, models):
    _, said = agent(fetch(models, 0, folder="nowhere"), None)
    (failed,) = said.heard_of
    assert (failed.beside, failed.final) == ([], False)
    assert "every node sees" in failed.why


def test_orders_for_one_model_that_fail_together_are_one_failure(agent, models):
    wanted = fetch(models, 0, folder="nowhere")
    _, said = agent(wanted, wanted, wanted, None, fetch(models, 1), None)
    assert [one.model for one in said.heard_of] == [0, 1]


def test_an_order_that_fails_while_a_later_one_goes_on_says_nothing(tmp_path, models):
    """The later order started again after the first one's chunks were removed."""

    async def scenario():
        heard, fetches = [], []

        async def begin(*_wanted, **_more):
            fetches.append(asyncio.get_running_loop().create_future())
            return await fetches[-1]

        agent = Agent(
            options=NodeOptions(place=0, folder=tmp_path, journals=tmp_path),
            token=TOKEN,
            address="",
        )
        agent._line, agent._store = SimpleNamespace(send=heard.append), SimpleNamespace(fetch=begin)
        for _ in range(2):
            agent._fetch(fetch(models, 0))
            await asyncio.sleep(0)
        fetches[0].set_exception(EvaluationError("The first."))
        await asyncio.sleep(0)
        assert heard == []
        fetches[1].set_exception(OSError("The second."))
        await asyncio.sleep(0)
        return heard

    assert asyncio.run(scenario()) == [messages.FetchFailed(model=0, why="The second.")]


def test_without_shared_memory_it_says_so_and_goes_on(agent, models, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(store, "DEFAULT_ROOT", tmp_path / "missing")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, said = agent(fetch(models, 0), None, store_root="", store_bytes=0)
    assert code == 0
    assert Path(said.heard_of[0].folder).is_relative_to(tmp_path)
    assert "on a disk" in caplog.text
