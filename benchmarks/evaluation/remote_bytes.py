"""Measure the bytes read from remote storage by 1 to 64 nodes, with each node's own store."""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from common.jobs import say
from common.machine import Quiet
from common.table import Must, Row
from evaluation.storage import make_weights, serving
from holdfast.core.clock import SystemClock
from holdfast.evaluate.types.model_manifest import ModelManifest
from holdfast.evaluate.weights.assign import assign
from holdfast.evaluate.weights.describe import describe
from holdfast.evaluate.weights.fetch import Fetched, NodeStore

MODEL_BYTES = 64 * 1024 * 1024
STORE_MIB_S = 64.0
"""The rate of the storage: N reads of the model would take N seconds."""
TIMEOUT_S = 120.0


NODES = (1, 2, 4, 8, 16, 32, 64)


def rows(folder: Path, quiet: Quiet, *, quick: bool, rounds: int, seed: int) -> Iterator[Row]:
    """Yield the number of reads of the checkpoint from storage, for each number of nodes."""
    del rounds, seed
    for nodes in (1, 4) if quick else NODES:
        quiet.wait()
        one = load_on(
            nodes, folder / f"nodes-{nodes}", model_bytes=MODEL_BYTES // (4 if quick else 1)
        )
        named = f"{nodes} node{'s' * (nodes > 1)}"
        say(f"{named}: {one.copies:.6f} copies of the checkpoint read in {one.seconds:.1f} s")
        yield Row(measure=f"{named}: bytes read from storage over the checkpoint's size", ours=one.copies, limit=1,
                  unit="copies", must=Must("=", 1))  # fmt: skip
        yield Row(
            measure=f"{named}: loading, all on this machine (limit: the storage's bandwidth)",
            ours=one.seconds,
            limit=one.limit_s,
            unit="s",
        )


class Loaded:
    """The cost of one model on all nodes."""

    def __init__(
        self,
        *,
        remote_bytes: int,
        model_bytes: int,
        said_bytes: int,
        seconds: float,
        limit_s: float,
    ) -> None:
        self.remote_bytes, self.model_bytes, self.said_bytes = remote_bytes, model_bytes, said_bytes
        self.seconds, self.limit_s = seconds, limit_s

    @property
    def copies(self) -> float:
        """The server's count of sent bytes over the checkpoint's size."""
        return self.remote_bytes / self.model_bytes


def load_on(nodes: int, folder: Path, *, model_bytes: int = MODEL_BYTES) -> Loaded:
    """Have nodes read a new model.

    Raises:
        TimeoutError: the nodes took longer than `TIMEOUT_S`.

    Raises:
        TimeoutError: it took longer than `TIMEOUT_S`.
        RuntimeError: nodes have different bytes.
    """
    make_weights(folder / "model", model_bytes)
    with (
        serving(folder, STORE_MIB_S) as storage,
        # Not in shared memory: 64 copies of it are 4 GiB.
        tempfile.TemporaryDirectory(prefix="stores-", dir=folder) as root,
    ):
        manifest = describe(f"{storage.url}/model")
        before_bytes = storage.sent_bytes()
        began_s = time.monotonic()
        fetched = asyncio.run(asyncio.wait_for(_fetch(nodes, manifest, Path(root)), TIMEOUT_S))
        seconds = time.monotonic() - began_s
        if len({one.digest for one in fetched}) != 1:
            raise RuntimeError("the nodes have different bytes of one model")
        return Loaded(
            remote_bytes=storage.sent_bytes() - before_bytes,
            model_bytes=manifest.size_bytes,
            said_bytes=sum(one.remote_bytes for one in fetched),
            seconds=seconds,
            limit_s=manifest.size_bytes / (STORE_MIB_S * 1024 * 1024),
        )


async def _fetch(nodes: int, manifest: ModelManifest, root: Path) -> list[Fetched]:
    token = os.urandom(8).hex()
    stores = [
        NodeStore(root, f"node-{node}", 2 * MODEL_BYTES, token, SystemClock())
        for node in range(nodes)
    ]
    try:
        peers = {node: await store.start() for node, store in enumerate(stores)}
        owners = assign(manifest, range(nodes))
        return list(
            await asyncio.gather(
                *(
                    store.fetch(0, manifest, owners, peers, node)
                    for node, store in enumerate(stores)
                )
            )
        )
    finally:
        for store in stores:
            await store.close()
