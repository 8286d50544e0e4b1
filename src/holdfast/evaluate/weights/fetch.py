"""A node's models: gets each into shared memory together with the other nodes, serves its chunks, clears it away."""

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
from holdfast.evaluate.weights.source import HeldModels, Sleep, open_source
from holdfast.evaluate.weights.store import MemoryFull, SharedMemory


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A model that lies whole in `folder`, as a Hugging Face folder.

    Attributes:
        folder: in this node's shared memory, until the model is released.
        digest: of the model's content, in hex; the same on every node.
        remote_bytes: read of the source by this node.
        peer_bytes: got from other nodes.
        seconds: since this node was first asked for it.
    """

    folder: Path
    digest: str
    remote_bytes: int
    peer_bytes: int
    seconds: float


class NodeStore:
    """The models of one node agent. Of one event loop; `start` first, `close` last.

    A model of form "huggingface" takes its size of shared memory. One of form "dcp" takes its tensors' bytes twice
    while it is converted, until no other node needs what was read, then once.

    Args:
        root: where models are kept; None for /dev/shm (`SharedMemory`).
        session: names this agent's part of it, unique among those alive on the machine.
        budget_bytes: shared memory to use at most.
        token: of the evaluation: whoever asks for chunks must have it.
        clock: for times and limits.
        nic_mib_s: the rate of an emulated NIC, in each direction; None for none.
        held: what training jobs on this node still hold; read from there first.
        sleep: waits.

    Raises:
        BadUse: the session is in use.
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
        """Serve chunks on a free port of `host`; returns host:port, for the others."""
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
        """Get a model. Called again, while it comes or after, it goes on with these owners, peers and rate.

        Args:
            model: the caller's number for it.
            manifest: what it consists of.
            owners: chunk to the node that reads it of the source.
            peers: node to host:port of its chunks; this node may be among them.
            node: this node's number.
            max_read_mib_s: the rate to read at, of source and peers together, for one that is not needed yet.

        Raises:
            MemoryFull: it does not fit; what was begun of it is gone.
            DamagedModel: no node could have it.
            EvaluationError: it cannot be had; what was begun of it is gone.
            BadUse: nothing here reads such a source.
        """
        entry = self._models.get(model)
        if entry is None:
            entry = self._models[model] = self._begin(model, manifest)
        entry.share.budget.max_bytes_s = _bytes_of(max_read_mib_s)
        await entry.share.share_out(owners, peers, node)
        entry.finishing = entry.finishing or asyncio.ensure_future(entry.finish())
        try:
            # Shielded: of several callers one may give up, and the model comes nevertheless.
            return await asyncio.shield(entry.finishing)
        except asyncio.CancelledError:
            if not entry.finishing.cancelled():
                raise
            raise EvaluationError(
                f"Model {model} was released before all of it had come."
            ) from None
        except Exception:
            await self._drop(model)
            raise

    def hold(self, model: int) -> Path:
        """One more user of a model that is there; to be released as often. Returns its folder.

        Raises:
            EvaluationError: it is not there.
        """
        entry = self._models.get(model)
        if entry is None or entry.users == 0 or not entry.folder.is_dir():
            raise EvaluationError(f"Model {model} is not in this node's memory. Fetch it first.")
        entry.users += 1
        return entry.folder

    async def release(self, model: int) -> None:
        """One user less; with the last (the first is who fetched it) the model's memory is given back.

        Engines that map its files keep what they map. A model that is not there is no error.
        """
        entry = self._models.get(model)
        if entry is not None:
            entry.users -= 1
            if entry.users <= 0:
                await self._drop(model)

    async def close(self) -> None:
        """Release everything, hang up and clear the session."""
        for model in list(self._models):
            await self._drop(model)
        await self._server.close()
        self.memory.close()

    def _begin(self, model: int, manifest: ModelManifest) -> "_Model":
        source = open_source(manifest.source, sleep=self._sleep)
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
    """One model: `chunks_name` is the folder of what is read, `name` that of what engines load."""

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
        """Wait for all chunks, check and convert."""
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
        """Stop whatever is under way and give the memory back."""
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
                f"{manifest.source} is damaged: {error}. `holdfast checkpoint verify` says which ones are whole."
            ) from error

    async def _convert(self) -> None:
        """Make the Hugging Face folder, in a process of its own: this one stays free of torch."""
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
            _, said = await answer_of(process, manifest.name_map.encode())
            if process.returncode:
                last = said.decode(errors="replace").strip().splitlines()[-1:]
                raise DamagedModel(
                    f"{manifest.source} could not be converted: {''.join(last) or 'no reason given'}"
                )
            write_hf_small_files(making, manifest.hf_config)
            making.rename(self.folder)
        finally:
            shutil.rmtree(making, ignore_errors=True)

    async def _release_chunks(self) -> None:
        """Give back what was read of the source, once no node needs it any more."""
        await self.share.say_finished()
        await self.share.close()
        await in_a_thread(partial(self._memory.drop, self._chunks_name))


def _bytes_of(mib: float | None) -> float | None:
    return None if mib is None else mib * (1 << 20)
