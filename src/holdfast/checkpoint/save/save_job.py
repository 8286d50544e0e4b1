"""Hold the data of one rank's save, from the call until the save has ended."""

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.checkpoint.ipc.save_request import SaveRequest
from holdfast.checkpoint.save.results import SaveReport  # noqa: TC001 - a dataclass
from holdfast.checkpoint.snapshot.buffer_pool import Buffer
from holdfast.checkpoint.snapshot.copy import ChangeTracker
from holdfast.checkpoint.snapshot.gpu.copy import Taken
from holdfast.checkpoint.snapshot.gpu.devices import Devices, Streams
from holdfast.checkpoint.state.capture import Contents


@dataclass(eq=False)
class SaveJob:
    """Hold the data of one save.

    Attributes:
        order: the request to the writing process.
        began_s: when `save` was called, on the monotonic clock.
        must: whether the save must not be skipped.
        metrics: the step's metrics, as given; the staging thread reads them.
        blocking: whether the call waits for the copy.
        streams: the GPU streams that were current in the call, by device.
        boundaries: an event on each of `streams`, recorded in the call.
        contents: the state.
        snapshot: the tracker that detects changes of the state.
        sources: the source of each blob of the image.
        devices: the GPUs that hold part of the state.
        taken: the GPUs' copies.
        digests: the digests of the live tensors on the host; None if the save is not attested.
        error: the error that kept this rank from collecting the state.
        failure: the error that stopped the copy.
        seat: the buffer that receives the copy.
        generation: the generation of the buffer for this save.
        outcome: the future of the save; its result is None if the save was skipped.
        staged: set once the state may change.
        call_s: seconds in the call of `save`.
        fence_s: seconds that the CPU waited at the fence.
    """

    order: SaveRequest
    began_s: float
    must: bool
    metrics: Mapping[str, Any] = field(default_factory=dict)
    blocking: bool = True
    streams: Streams = field(default_factory=dict)
    boundaries: list[torch.cuda.Event] = field(default_factory=list)
    contents: Contents = field(init=False, repr=False)
    snapshot: ChangeTracker = field(init=False, repr=False)
    sources: list[Any] = field(default_factory=list)
    devices: Devices | None = None
    taken: list[Taken] = field(default_factory=list)
    digests: bytes | None = None
    error: Exception | None = None
    failure: Exception | None = None
    seat: Buffer | None = None
    generation: int = 0
    outcome: "Future[SaveReport | None]" = field(default_factory=Future)
    staged: threading.Event = field(default_factory=threading.Event)
    call_s: float = 0.0
    fence_s: float = 0.0
    _watching: threading.Lock = field(default_factory=threading.Lock)
    _changed: list[str] | None = None

    def changed(self) -> list[str]:
        """Return the names of the tensors written to since the call and before their copy."""
        places = self.snapshot.changed()
        if not places:
            return []
        ids = {id(self.contents.tensors[place]) for place in places}
        leaves = self.contents.leaves(None)
        settled = self.devices.settled(self.taken) if self.devices else ()
        return [name for name, leaf in leaves.items() if id(leaf) in ids and name not in settled]

    def changed_until_now(self) -> list[str]:
        """Return `changed` as of the first call of this method.

        Later changes are not returned, since the state may change from then on.
        """
        with self._watching:
            if self._changed is None:
                self._changed = self.changed()
        return self._changed

    def began_on(self, streams: Streams) -> None:
        """Record an event on each stream: the end of the training's step."""
        self.streams = streams
        self.boundaries = [stream.record_event() for stream in streams.values()]

    def await_boundary(self) -> None:
        """Make this thread's streams wait for the work that training queued before `save`."""
        for device, boundary in zip(self.streams, self.boundaries, strict=True):
            torch.cuda.set_device(device)  # a new thread starts on the first device
            torch.cuda.current_stream(device).wait_event(boundary)

    def pass_fence(self) -> bool:
        """Return once the state may change.

        If the bytes are on a GPU, that GPU waits, and the call returns at once.

        Returns:
            Whether an update on another stream has nothing left to wait for.
        """
        self.staged.wait()
        if not self.devices or not self.taken:
            return True
        self.changed_until_now()
        self.devices.pass_fence(self.taken)
        return all(one.is_unstaged for one in self.taken)

    def release(self) -> None:
        """End the copy: drop the sources, and let updates proceed."""
        self.sources.clear()
        for one in self.taken:
            one.release()
        self.staged.set()

    def forget(self) -> None:
        """Drop the state, since changes after a durable save do not matter.

        A save that waited for its copy keeps the state, because the fence still looks for changes.
        To free thousands of tensors takes milliseconds of Python's lock, so the state is dropped
        here and not in the next call of `save`.
        """
        if not self.blocking:
            del self.contents, self.snapshot

    def fence_seconds(self) -> float:
        """Return the seconds that the update waited, on the CPU or on a GPU.

        Call this method in a thread of Holdfast, since it changes the thread's device.
        """
        for device in self.streams if self.taken else ():
            # A new thread starts on the first device, where the query would take memory.
            torch.cuda.set_device(device)
        return self.fence_s + max((one.fence_s for one in self.taken), default=0.0)
