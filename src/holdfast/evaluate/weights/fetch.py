"""Fetch models into a node's shared memory, together with other nodes, and release them."""

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.checkpoint import (
    FileEntry,
    ManifestError,
    check_file_contents,
    conversion_command,
    write_hf_small_files,
)
from holdfast.core.child_process import answer_of
from holdfast.core.clock import Clock
from holdfast.core.rate_limit import AsyncRateLimit
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.model_manifest import DamagedModel, ModelManifest, model_digest
from holdfast.evaluate.weights.exchange import ChunkServer
from holdfast.evaluate.weights.share import ModelShare, in_a_thread
from holdfast.evaluate.weights.source import HeldModels, Sleep, open_model
from holdfast.evaluate.weights.store import MemoryFull, SharedMemory


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """Describe a model that is complete on this node, as a Hugging Face folder.

    Attributes:
        folder: the folder in this node's shared memory; it exists until the model is released.
        digest: the digest of the model's content in hex, equal on every node.
        remote_bytes: the bytes that this node read from the source.
        peer_bytes: the bytes that this node received from other nodes.
        seconds: the time since the first call of `fetch` for this model.
    """

    folder: Path
    digest: str
    remote_bytes: int
    peer_bytes: int
    seconds: float


class NodeStore:
    """Keep the models of one node agent; call `start` first, `close` last, in one event loop.

    A model of the form "huggingface" takes its size in shared memory. A model of the form "dcp"
    takes twice the size of its tensors while it is converted and while other nodes need its chunks,
    and afterwards once their size.

    Args:
        root: the folder for models; None for /dev/shm (see `SharedMemory`).
        session: the name of this agent's folder in the shared memory, unique among the running
            agents on the machine.
        budget_bytes: the largest amount of shared memory to use.
        token: the evaluation's token, which peers must present.
        clock: the clock for times and rate limits.
        nic_mib_s: the rate in MiB/s of an emulated network card, in each direction; None for no
            limit.
        held: finds models in the memory of training jobs on this node, from which they are read
            first.
        sleep: the function that waits.

    Raises:
        BadUse: a running agent uses the session's name.
    """

    def __init__(
        self,
        root: Path | None,
        session: str,
        budget_bytes: int,
        token: str,
        clock: Clock,
        *,
        nic_mib_s: float | None = None,
        held: HeldModels | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.memory = SharedMemory(root, session, budget_bytes)
        self._token = token
        self._clock = clock
        self._held = held
        self._sleep = sleep
        self._nic_in = self._limit(nic_mib_s)
        self._server = ChunkServer(token, self._limit(nic_mib_s))
        self._models: dict[int, _Model] = {}

    async def start(self, host: str = "127.0.0.1") -> str:
        """Start to serve chunks on a free port of `host`; return host:port for the peers."""
        return await self._server.start(host)

    async def fetch(
        self,
        model: int,
        manifest: ModelManifest,
        owners: Sequence[int],
        peers: Mapping[int, str],
        node: int,
        *,
        max_read_mib_s: float | None = None,
    ) -> Fetched:
        """Fetch a model and wait until it is complete.

        A further call for the same model changes the owners, peers and rate of the fetch in
        progress.

        Args:
            model: the caller's number for the model.
            manifest: the files of the model.
            owners: for each chunk, the number of the node that reads it from the source.
            peers: node number to the host:port where that node serves chunks; may include this
                node.
            node: this node's number.
            max_read_mib_s: the limit in MiB/s on reading from source and peers together, for a
                model that is not needed yet; None for no limit.

        Raises:
            MemoryFull: the model does not fit; its chunks were removed.
            DamagedModel: no node can load the model.
            EvaluationError: the model cannot be fetched; its chunks were removed.
            BadUse: no reader supports the kind of source that the manifest names.
        """
        entry = self._models.get(model)
        if entry is None:
            entry = self._models[model] = self._begin(model, manifest)
        entry.share.budget.max_bytes_s = _bytes_of(max_read_mib_s)
        await entry.share.share_out(owners, peers, node)
        entry.finishing = entry.finishing or asyncio.ensure_future(entry.finish())
        try:
            # Shield the fetch, so that it continues if one of several callers is cancelled.
            return await asyncio.shield(entry.finishing)
        except asyncio.CancelledError:
            if not entry.finishing.cancelled():
                raise
            raise EvaluationError(
                f"Model {model} was released before it was fetched completely."
            ) from None
        except Exception:
            await self._drop(model)
            raise

    def hold(self, model: int) -> Path:
        """Add a user to a model that is present, and return the model's folder.

        Raises:
            EvaluationError: the model is not present.
        """
        entry = self._models.get(model)
        if entry is None or entry.users == 0 or not entry.folder.is_dir():
            raise EvaluationError(f"Model {model} is not in this node's memory. Fetch it first.")
        entry.users += 1
        return entry.folder

    async def release(self, model: int) -> None:
        """Remove a user of a model; free the model's memory when no user is left.

        The caller of `fetch` counts as the first user. Engines keep the files that they have
        mapped. The call does nothing for a model that is not present.
        """
        entry = self._models.get(model)
        if entry is not None:
            entry.users -= 1
            if entry.users <= 0:
                await self._drop(model)

    async def close(self) -> None:
        """Release all models, close all connections and remove the session's folder."""
        for model in list(self._models):
            await self._drop(model)
        await self._server.close()
        self.memory.close()

    def _begin(self, model: int, manifest: ModelManifest) -> "_Model":
        source = open_model(manifest, sleep=self._sleep)
        name = f"model-{model}"
        chunks_name = f"{name}.chunks" if manifest.form == "dcp" else name
        sizes = [(file.path, file.size_bytes) for file in manifest.files]
        files = self.memory.make(chunks_name, sizes, manifest.size_bytes)
        if manifest.form == "dcp":
            try:
                self.memory.set_aside(name, manifest.converted_bytes)
            except MemoryFull:
                self.memory.drop(chunks_name)
                raise
        share = ModelShare(
            manifest,
            files,
            self.memory,
            source,
            self._held.find(manifest) if self._held is not None else None,
            self._token,
            self._nic_in,
            self._limit(None),
            self._sleep,
        )
        self._server.show(share.fingerprint, share)
        return _Model(name, chunks_name, share, self.memory, self._clock)

    def _limit(self, mib_s: float | None) -> AsyncRateLimit:
        return AsyncRateLimit(_bytes_of(mib_s), self._clock.monotonic_s, self._sleep)

    async def _drop(self, model: int) -> None:
        entry = self._models.pop(model, None)
        if entry is not None:
            self._server.take_away(entry.share.fingerprint, entry.share)
            await entry.close()


class _Model:
    """A model on this node.

    `chunks_name` is the folder with the model's chunks, and `name` the folder for engines.
    """

    def __init__(
        self, name: str, chunks_name: str, share: ModelShare, memory: SharedMemory, clock: Clock
    ) -> None:
        self.share = share
        self.users = 1
        self.folder = memory.path(name)
        self.finishing: asyncio.Task[Fetched] | None = None
        self._name, self._chunks_name = name, chunks_name
        self._memory = memory
        self._clock = clock
        self._began_s = clock.monotonic_s()
        self._releasing: asyncio.Task[None] | None = None

    async def finish(self) -> Fetched:
        """Wait for all chunks, check the files, and convert them if needed."""
        manifest = self.share.manifest
        digests = await self.share.complete()
        await asyncio.to_thread(self._check_files)
        if manifest.form == "dcp":
            await self._convert()
            self._releasing = asyncio.ensure_future(self._release_chunks())
        return Fetched(
            folder=self.folder,
            digest=model_digest(manifest, digests),
            remote_bytes=self.share.remote_bytes,
            peer_bytes=self.share.peer_bytes,
            seconds=self._clock.monotonic_s() - self._began_s,
        )

    async def close(self) -> None:
        """Stop all tasks and free the memory."""
        await self.share.close()
        tasks = [task for task in (self.finishing, self._releasing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for name in {self._name, self._chunks_name}:
            await in_a_thread(partial(self._memory.drop, name))

    def _check_files(self) -> None:
        manifest = self.share.manifest
        sizes = {file.path: file.size_bytes for file in manifest.files}
        entries = [
            FileEntry(path=path, size_bytes=sizes[path], checksum=digest)
            for path, digest in manifest.file_digests.items()
        ]
        try:
            check_file_contents(self._memory.path(self._chunks_name), entries)
        except ManifestError as error:
            raise DamagedModel(
                f"{manifest.source} is damaged: {error}. `holdfast checkpoint verify` lists the "
                "undamaged ones."
            ) from error

    async def _convert(self) -> None:
        """Convert the files to a Hugging Face folder in a separate process, which imports torch."""
        manifest = self.share.manifest
        making = self._memory.path(f"{self._name}.making")
        making.mkdir(mode=0o700)
        command = conversion_command(self._memory.path(self._chunks_name), making)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, output = await answer_of(process, manifest.name_map.encode())
            if process.returncode:
                last = output.decode(errors="replace").strip().splitlines()[-1:]
                raise DamagedModel(
                    f"{manifest.source} could not be converted: "
                    f"{''.join(last) or 'no reason given'}"
                )
            write_hf_small_files(making, manifest.hf_config)
            making.rename(self.folder)
        finally:
            shutil.rmtree(making, ignore_errors=True)

    async def _release_chunks(self) -> None:
        """Free the folder with the chunks once no node needs them."""
        await self.share.say_finished()
        await self.share.close()
        await in_a_thread(partial(self._memory.drop, self._chunks_name))


def _bytes_of(mib: float | None) -> float | None:
    return None if mib is None else mib * (1 << 20)
