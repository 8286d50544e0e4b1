"""Fetch models into many nodes: read once, equal on all nodes, under any failure."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash
from weights_world import (
    TOKEN,
    at_once,
    fetch_all,
    folder_digest,
    make_files,
    manifest_of,
    nodes,
    storage_over_http,
)

from holdfast.checkpoint.format.manifest import describe_file
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.model_manifest import DamagedModel
from holdfast.evaluate.weights import exchange, share
from holdfast.evaluate.weights.assign import assign, reassign
from holdfast.evaluate.weights.source import open_source
from holdfast.evaluate.weights.store import MemoryFull, SharedFile
from holdfast.testing import FakeClock

SIZES = {
    "config.json": 17,
    "empty.json": 0,
    "model-1.safetensors": 500_000,
    "model-2.safetensors": 123_457,
}
CHUNK = 10_000


@pytest.fixture
def model(tmp_path):
    make_files(tmp_path / "source", SIZES)
    return manifest_of(tmp_path / "source", SIZES, CHUNK)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "memory"


def chunk_digests(manifest):
    folder = Path(manifest.source)
    content = {file.path: (folder / file.path).read_bytes() for file in manifest.files}
    cuts = [
        (manifest.files[each.file].path, each.offset, each.offset + each.size_bytes)
        for each in manifest.chunks
    ]
    return [xxhash.xxh3_128_hexdigest(content[path][start:end]) for path, start, end in cuts]


def elsewhere(manifest, url, **changes):
    fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    return type(manifest)(**{**fields, "source": url, **changes})


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 16, 32, 64])
def test_remote_bytes_are_exactly_one_checkpoint_for_any_number_of_nodes(model, root, count):
    async def run():
        async with nodes(root, count) as (stores, peers):
            fetched = await fetch_all(stores, peers, model)
            for each in fetched:
                assert folder_digest(each.folder) == folder_digest(model.source)
            assert sum(each.remote_bytes for each in fetched) == model.size_bytes
            assert sum(each.peer_bytes for each in fetched) == (count - 1) * model.size_bytes
            most = max(each.remote_bytes for each in fetched)
            assert most <= model.size_bytes / count + CHUNK
            return {each.digest for each in fetched}

    assert len(asyncio.run(run())) == 1
    assert not list(root.rglob("model-*")), "memory is given back"


def test_the_digest_is_that_of_the_content_alone(model, root, tmp_path):
    async def run(manifest, count, owners=None):
        async with nodes(root, count) as (stores, peers):
            (digest,) = {each.digest for each in await fetch_all(stores, peers, manifest, owners)}
            return digest

    first = asyncio.run(run(model, 1))
    assert asyncio.run(run(model, 3)) == first
    assert asyncio.run(run(model, 3, [2] * len(model.chunks))) == first
    make_files(tmp_path / "copy", SIZES)
    assert asyncio.run(run(manifest_of(tmp_path / "copy", SIZES, CHUNK), 2)) == first
    with (tmp_path / "copy/model-2.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    assert asyncio.run(run(manifest_of(tmp_path / "copy", SIZES, CHUNK), 2)) != first


def test_storage_that_fails_a_third_of_reads_only_slows_things(model, root):
    async def run(storage, sleep):
        async with nodes(root, 4, sleep=sleep) as (stores, peers):
            fetched = await fetch_all(stores, peers, elsewhere(model, storage.url))
            assert {str(folder_digest(each.folder)) for each in fetched} == {
                str(folder_digest(model.source))
            }
            assert sum(each.remote_bytes for each in fetched) == model.size_bytes

    async def briefly(_seconds):
        await asyncio.sleep(0)

    with storage_over_http(model.source) as storage:
        asyncio.run(run(storage, asyncio.sleep))
        assert storage.sent_bytes == model.size_bytes, "and by the server's own count"
    with storage_over_http(model.source, failing=0.3) as storage:
        asyncio.run(run(storage, briefly))
        assert storage.failed > 5


def test_storage_that_is_away_is_one_sentence(model, root):
    async def run(url):
        async with nodes(root, 1, sleep=at_once) as (stores, peers):
            with pytest.raises(EvaluationError, match="Check that the storage can be reached"):
                await fetch_all(stores, peers, elsewhere(model, url))
            assert stores[0].memory.used_bytes == 0

    with storage_over_http(model.source, failing=1.0) as storage:
        asyncio.run(run(storage.url))
    asyncio.run(run(storage.url))


def test_a_folder_that_one_node_does_not_see(model, root):
    async def run():
        async with nodes(root, 1) as (stores, peers):
            with pytest.raises(EvaluationError, match="Give a folder that every node sees"):
                await fetch_all(stores, peers, elsewhere(model, "/no/such/folder"))
            assert not list(root.rglob("model-*"))

    asyncio.run(run())


def test_a_chunk_damaged_in_a_peers_memory_is_refused_and_read_from_the_source(model, root):
    async def run():
        async with nodes(root, 2) as (stores, peers):
            owners = [0] * len(model.chunks)
            first = await stores[0].fetch(0, model, owners, {0: peers[0]}, 0)
            with (first.folder / "model-1.safetensors").open("r+b") as file:
                file.seek(25_000)
                file.write(b"damage")
            second = await stores[1].fetch(0, model, owners, peers, 1)
            assert folder_digest(second.folder) == folder_digest(model.source)
            assert second.digest == first.digest
            assert second.remote_bytes == CHUNK
            assert second.peer_bytes == model.size_bytes - CHUNK

    asyncio.run(run())


def test_a_chunk_that_comes_damaged_from_the_source_is_read_again_where_its_digest_is_known(
    model, root
):
    async def run(storage, *, whole):
        manifest = elsewhere(model, storage.url, digests=chunk_digests(model))
        async with nodes(root, 2) as (stores, peers):
            if whole:
                fetched = await fetch_all(stores, peers, manifest)
                assert folder_digest(fetched[0].folder) == folder_digest(model.source)
                assert sum(each.remote_bytes for each in fetched) == model.size_bytes + 2 * CHUNK
            else:
                asking = [
                    asyncio.ensure_future(
                        store.fetch(0, manifest, assign(manifest, peers), peers, number)
                    )
                    for number, store in enumerate(stores)
                ]
                done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_EXCEPTION)
                (error,) = [each.exception() for each in done]
                assert isinstance(error, DamagedModel)
                assert "bytes 20000 to 30000 of model-1.safetensors do not match" in str(error)
                for each in asking:
                    each.cancel()
                await asyncio.gather(*asking, return_exceptions=True)

    with storage_over_http(model.source) as storage:
        storage.corrupt["model-1.safetensors", 20_000] = 2
        asyncio.run(run(storage, whole=True))
        storage.corrupt["model-1.safetensors", 20_000] = 1000
        asyncio.run(run(storage, whole=False))


def test_a_peer_whose_chunk_is_not_what_the_source_states_is_not_believed(model, root):
    async def run(storage):
        manifest = elsewhere(model, storage.url, digests=chunk_digests(model))
        async with nodes(root, 2) as (stores, peers):
            owners = [0] * len(model.chunks)
            first = asyncio.ensure_future(stores[0].fetch(0, manifest, owners, {0: peers[0]}, 0))
            while not stores[0]._models:
                await asyncio.sleep(0)
            stores[0]._models[0].share._is_right = lambda *_: True  # it does not look
            assert folder_digest((await first).folder) != folder_digest(model.source)
            second = await stores[1].fetch(0, manifest, owners, peers, 1)
            assert folder_digest(second.folder) == folder_digest(model.source)
            assert second.remote_bytes == CHUNK

    with storage_over_http(model.source) as storage:
        storage.corrupt["model-1.safetensors", 20_000] = 1
        asyncio.run(run(storage))


def test_a_chunk_whose_peer_was_lost_is_not_forgotten_when_owners_change_in_the_pause(model, root):
    paused, go_on = asyncio.Event(), asyncio.Event()

    async def sleep(_seconds):
        paused.set()
        await go_on.wait()

    async def run(dead):
        async with nodes(root, 1, sleep=sleep) as (stores, peers):
            everyone = {0: peers[0], 1: dead}
            coming = asyncio.ensure_future(
                stores[0].fetch(0, model, [1] * len(model.chunks), everyone, 0)
            )
            await paused.wait()
            again = asyncio.ensure_future(
                stores[0].fetch(0, model, [0] * len(model.chunks), everyone, 0)
            )
            while len(stores[0]._models[0].share._missing) > 1:
                await asyncio.sleep(0)
            go_on.set()
            async with asyncio.timeout(240):
                fetched = await coming
            assert await again == fetched
            assert fetched.remote_bytes == model.size_bytes

    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    asyncio.run(run(address))


def test_a_whole_file_is_checked_against_the_checksum_that_its_checkpoint_states(model, root):
    right = describe_file(Path(model.source), "model-1.safetensors").checksum
    form, _, digest = right.partition(":")

    async def run(stated):
        async with nodes(root, 1) as (stores, peers):
            manifest = elsewhere(model, model.source, file_digests={"model-1.safetensors": stated})
            return await fetch_all(stores, peers, manifest)

    asyncio.run(run(right))
    with pytest.raises(DamagedModel, match=r"model-1.safetensors does not match its checksum"):
        asyncio.run(run(f"{form}:{digest[::-1]}"))


def test_full_shared_memory_is_one_sentence_and_leaves_nothing(model, root, monkeypatch):
    async def too_small():
        async with nodes(root, 1, budget_bytes=model.size_bytes - 1) as (stores, peers):
            with pytest.raises(MemoryFull, match="are needed in"):
                await fetch_all(stores, peers, model)
            assert not list(root.rglob("model-*"))

    async def filled_by_others():
        def write(self, data, offset):
            raise OSError(errno.ENOSPC, "No space left on device")

        async with nodes(root, 1) as (stores, peers):
            with monkeypatch.context() as patch:
                patch.setattr(SharedFile, "write", write)
                with pytest.raises(MemoryFull, match="Mount a larger"):
                    await fetch_all(stores, peers, model)
            assert not list(root.rglob("model-*"))
            assert (await fetch_all(stores, peers, model))[0].remote_bytes == model.size_bytes

    asyncio.run(too_small())
    asyncio.run(filled_by_others())


def test_a_model_that_fits_once_another_is_released(model, root):
    async def run():
        async with nodes(root, 1, budget_bytes=model.size_bytes + 100) as (stores, peers):
            owners = [0] * len(model.chunks)
            await stores[0].fetch(0, model, owners, peers, 0)
            with pytest.raises(MemoryFull) as error:
                await stores[0].fetch(1, model, owners, peers, 0)
            assert error.value.after_release
            folder = stores[0].hold(0)
            await stores[0].release(0)
            assert folder.is_dir(), "somebody holds it"
            await stores[0].release(0)
            assert not folder.exists()
            await stores[0].release(0)
            with pytest.raises(EvaluationError, match="Fetch it first"):
                stores[0].hold(0)
            await stores[0].fetch(1, model, owners, peers, 0)

    asyncio.run(run())


def test_a_peer_that_died_or_hangs_is_done_without_once_it_had_its_time(model, root, monkeypatch):
    monkeypatch.setattr(exchange, "SILENCE_S", 0.5)

    async def run(dead):
        async with nodes(root, 2, sleep=at_once) as (stores, peers):
            owners = assign(model, [0, 1, 2])
            fetched = await fetch_all(stores, {**peers, 2: dead}, model, owners)
            for each in fetched:
                assert folder_digest(each.folder) == folder_digest(model.source)
            # Each of the two had to read what the third was to read, or got it from the other.
            lost = sum(
                cut.size_bytes
                for cut, owner in zip(model.chunks, owners, strict=True)
                if owner == 2
            )
            assert (
                model.size_bytes
                <= sum(each.remote_bytes for each in fetched)
                <= model.size_bytes + lost
            )

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        asyncio.run(run(address))
    asyncio.run(run(address))


def test_new_owners_while_a_peer_is_silent_and_nothing_is_read_twice(model, root, monkeypatch):
    monkeypatch.setattr(share, "PATIENCE_S", 1000.0)
    owners = assign(model, [0, 1, 2])

    async def run(dead):
        async with nodes(root, 2) as (stores, peers):
            first = [
                asyncio.ensure_future(store.fetch(0, model, owners, {**peers, 2: dead}, number))
                for number, store in enumerate(stores)
            ]
            lost = {number for number, owner in enumerate(owners) if owner == 2}
            shelves = [store._models[0].share for store in stores if store._models] or []
            while len(shelves) < 2 or any(len(each._missing) > len(lost) for each in shelves):
                await asyncio.sleep(0)
                shelves = [store._models[0].share for store in stores if store._models]
            after = reassign(model, owners, {}, [0, 1])
            second = await fetch_all(stores, peers, model, after)
            assert await asyncio.gather(*first) == second
            assert sum(each.remote_bytes for each in second) == model.size_bytes
            assert folder_digest(second[1].folder) == folder_digest(model.source)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        asyncio.run(run(f"127.0.0.1:{silent.getsockname()[1]}"))


def test_chunks_that_a_peer_has_are_not_read_again_though_the_new_owner_does_not_know(model, root):
    async def run():
        async with nodes(root, 3) as (stores, peers):
            # Node 0 has all chunks. Node 1 waits for a node that never comes; then it is ordered to
            # read everything itself.
            await stores[0].fetch(0, model, [0] * len(model.chunks), {0: peers[0]}, 0)
            nowhere = {1: peers[1], 2: peers[2]}
            waiting = asyncio.ensure_future(
                stores[1].fetch(0, model, [2] * len(model.chunks), nowhere, 1)
            )
            while not stores[1]._models:
                await asyncio.sleep(0)
            fetched = await stores[1].fetch(
                0, model, [1] * len(model.chunks), {0: peers[0], 1: peers[1]}, 1
            )
            assert fetched.remote_bytes == 0
            assert await waiting == fetched

    asyncio.run(run())


def test_a_node_that_joins_late_gets_everything_from_the_others(model, root):
    async def run():
        async with nodes(root, 3) as (stores, peers):
            early = {node: peers[node] for node in (0, 1)}
            owners = assign(model, early)
            await fetch_all(stores[:2], early, model, owners)
            everything = set(range(len(model.chunks)))
            owners = reassign(model, owners, {0: everything, 1: everything}, peers)
            late = await fetch_all(stores, peers, model, owners)
            assert late[2].remote_bytes == 0
            assert folder_digest(late[2].folder) == folder_digest(model.source)
            assert late[0].remote_bytes + late[1].remote_bytes == model.size_bytes

    asyncio.run(run())


def test_a_node_that_failed_says_so_at_once_to_those_who_wait_for_its_chunks(model, root, tmp_path):
    async def run():
        async with nodes(root, 2, sleep=at_once) as (stores, peers):
            owners = assign(model, peers)
            hidden = Path(model.source).rename(tmp_path / "hidden")
            with pytest.raises(EvaluationError):
                await stores[0].fetch(0, model, owners, peers, 0)
            hidden.rename(model.source)
            fetched = await stores[1].fetch(0, model, owners, peers, 1)
            assert fetched.remote_bytes == model.size_bytes

    asyncio.run(run())


def test_what_a_training_job_still_holds_is_not_read_of_the_storage(model, root, tmp_path):
    class Held:
        def __init__(self, folder, good_reads):
            self.source = open_source(str(folder))
            self.good_reads = good_reads

        def find(self, manifest):
            return self

        async def read(self, path, offset, size_bytes):
            self.good_reads -= 1
            if self.good_reads < 0:
                raise FileNotFoundError("it was let go of")
            return await self.source.read(path, offset, size_bytes)

    async def run(manifest, held):
        async with nodes(root, 2, held=held) as (stores, peers):
            fetched = await fetch_all(stores, peers, manifest)
            assert folder_digest(fetched[1].folder) == folder_digest(model.source)
            return sum(each.remote_bytes for each in fetched)

    assert asyncio.run(run(model, Held(model.source, 10**6))) == 0
    assert asyncio.run(run(model, Held(model.source, 0))) == model.size_bytes
    # Of other bytes than the source states it is not believed.
    make_files(tmp_path / "other", SIZES, seed=1)
    stated = elsewhere(model, model.source, digests=chunk_digests(model))
    assert asyncio.run(run(stated, Held(tmp_path / "other", 10**6))) == model.size_bytes
    left = asyncio.run(run(model, Held(model.source, 20)))
    assert model.size_bytes - 20 * CHUNK <= left < model.size_bytes


def test_two_checkpoints_that_differ_in_nothing_but_their_bytes_are_not_mixed(
    model, root, tmp_path
):
    make_files(tmp_path / "next", SIZES, seed=1)
    following = elsewhere(model, str(tmp_path / "next"))

    async def run():
        async with nodes(root, 2) as (stores, peers):
            owners = assign(model, peers)
            asks = [
                store.fetch(number, manifest, owners, peers, node)
                for node, store in enumerate(stores)
                for number, manifest in enumerate((model, following))
            ]
            for each, manifest in zip(
                await asyncio.gather(*asks), (model, following) * 2, strict=True
            ):
                assert folder_digest(each.folder) == folder_digest(manifest.source)

    asyncio.run(run())


def test_a_model_released_while_it_comes_is_no_cancellation(model, root):
    async def run():
        async with nodes(root, 2) as (stores, peers):
            # Its owner does not fetch: this never comes.
            coming = asyncio.ensure_future(
                stores[1].fetch(0, model, [0] * len(model.chunks), peers, 1)
            )
            while not stores[1]._models:
                await asyncio.sleep(0)
            await stores[1].release(0)
            with pytest.raises(EvaluationError, match="released before it was fetched completely"):
                await coming
            assert stores[1].memory.used_bytes == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("nic", "budget", "rate"), [(0.5, None, 0.5), (None, 0.25, 0.25), (0.5, 0.25, 0.25)]
)
def test_a_rate_is_kept(model, root, nic, budget, rate):
    clock = FakeClock()

    async def sleep(seconds):
        clock.advance(seconds)

    async def run():
        async with nodes(root, 1, clock=clock, nic_mib_s=nic, sleep=sleep) as (stores, peers):
            (fetched,) = await fetch_all(stores, peers, model, max_read_mib_s=budget)
            expected_s = (
                model.size_bytes / 2**20 * (1 / nic + 1 / budget if nic and budget else 1 / rate)
            )
            # One of two limits passes while the other is waited for, in this clock as in any.
            assert model.size_bytes / 2**20 / rate - 0.1 <= fetched.seconds <= expected_s + 0.1

    asyncio.run(run())


def test_a_rate_that_is_lifted_while_a_model_comes_is_lifted_at_once(model, root):
    clock = FakeClock()

    async def sleep(seconds):
        clock.advance(seconds)
        await asyncio.sleep(0)

    async def run():
        async with nodes(root, 1, clock=clock, sleep=sleep) as (stores, peers):
            ahead = asyncio.create_task(fetch_all(stores, peers, model, max_read_mib_s=0.01))
            while not stores[0]._models or not stores[0]._models[0].share.remote_bytes:
                await asyncio.sleep(0)
            (fetched,) = await fetch_all(stores, peers, model)
            assert (await ahead) == [fetched]
            # Only the begun and the next chunk of each reader were waited for: not 62 s.
            assert fetched.seconds <= 2 * share.READS_AT_ONCE * CHUNK / 2**20 / 0.01

    asyncio.run(run())


AGENT = """
import asyncio, sys
from pathlib import Path
import msgspec
from holdfast.core.clock import SystemClock
from holdfast.evaluate.weights.fetch import NodeStore
from holdfast.evaluate.types.model_manifest import ModelManifest

async def main(root, manifest, token):
    manifest = msgspec.json.decode(Path(manifest).read_bytes(), type=ModelManifest)
    store = NodeStore(Path(root), "killed", 1 << 30, token, SystemClock())
    address = await store.start()
    print(address, flush=True)
    await store.fetch(0, manifest, [1] * len(manifest.chunks), {1: address}, 1, max_read_mib_s=0.05)

asyncio.run(main(*sys.argv[1:]))
"""


def test_an_agent_killed_in_the_middle_is_survived_and_cleared_at_the_next_start(
    model, root, tmp_path
):
    import msgspec

    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(model))
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(root), str(tmp_path / "manifest.json"), TOKEN],
        stdout=subprocess.PIPE,
    )
    try:
        address = agent.stdout.readline().decode().strip()

        async def run():
            async with nodes(root, 1) as (stores, peers):
                everyone = {0: peers[0], 1: address}
                owners = [1] * len(model.chunks)
                coming = asyncio.ensure_future(stores[0].fetch(0, model, owners, everyone, 0))
                while not (stores[0]._models and stores[0]._models[0].share.peer_bytes):
                    await asyncio.sleep(0)
                agent.send_signal(signal.SIGKILL)
                agent.wait()
                fetched = await stores[0].fetch(
                    0, model, reassign(model, owners, {}, [0]), peers, 0
                )
                assert await coming == fetched
                assert folder_digest(fetched.folder) == folder_digest(model.source)
                assert fetched.peer_bytes > 0
                assert fetched.remote_bytes + fetched.peer_bytes == model.size_bytes
                assert (root / f"holdfast-{os.getuid()}/killed/model-0").is_dir()

        asyncio.run(run())

        async def again():
            async with nodes(root, 1) as (stores, _):
                assert stores[0].memory.cleared == ["killed"]

        asyncio.run(again())
        assert not (root / f"holdfast-{os.getuid()}/killed").exists()
    finally:
        agent.kill()
        agent.wait()
        agent.stdout.close()
