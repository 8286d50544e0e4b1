"""Hold the data of one rank's save, from the call of `save` until the save has ended."""

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
        order: the request that is sent to the writing process.
        began_s: when `save` was called, on the monotonic clock.
        must: whether the save must be made even if earlier saves are still being written.
        metrics: the step's metrics, as given; the staging thread reads them.
        blocking: whether the call of `save` waits for the copy.
        streams: the GPU streams that were current in the call, by device.
        boundaries: an event on each of `streams`, recorded in the call.
        contents: the state to save.
        snapshot: the tracker that detects changes of the state.
        sources: for each item of the checkpoint, the tensor or the bytes to copy.
        devices: the GPUs that hold part of the state.
        taken: the copies that are running on each GPU.
        digests: the digests of the live tensors on the host; None if the save is not attested.
        error: the error that kept this rank from collecting the state.
        failure: the error that ended the copy early.
        seat: the buffer that receives the copy.
        generation: the number of this use of the buffer.
        outcome: the future of the save; its result is None if the save was skipped.
        staged: set once the CPU's part of the copy no longer needs the live state.
        call_s: seconds in the call of `save`.
        fence_s: seconds that optimizer steps waited on the CPU for this copy.
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
        """Return the names of tensors that were written to after the call but before their copy."""
        places = self.snapshot.changed()
        if not places:
            return []
        ids = {id(self.contents.tensors[place]) for place in places}
        leaves = self.contents.leaves(None)
        settled = self.devices.settled(self.taken) if self.devices else ()
        return [name for name, leaf in leaves.items() if id(leaf) in ids and name not in settled]

    def changed_until_now(self) -> list[str]:
        """Compute `changed` at the first call of this method, and return the same names later.

        Later changes do not count, because the first call is made when the state may change again.
        """
        with self._watching:
            if self._changed is None:
                self._changed = self.changed()
        return self._changed

    def began_on(self, streams: Streams) -> None:
        """Record an event on each stream, to mark the end of the training work queued so far."""
        self.streams = streams
        self.boundaries = [stream.record_event() for stream in streams.values()]

    def await_boundary(self) -> None:
        """Make this thread's GPU streams wait for the work that training queued before `save`."""
        for device, boundary in zip(self.streams, self.boundaries, strict=True):
            torch.cuda.set_device(device)  # a new thread starts on the first device
            torch.cuda.current_stream(device).wait_event(boundary)

    def pass_fence(self) -> bool:
        """Wait until the state may change.

        Copies on the CPU are waited for in this call. For copies on a GPU, only the GPU's current
        stream waits, and the call returns at once.

        Returns:
            True if updates on other streams can start at once.
        """
        self.staged.wait()
        if not self.devices or not self.taken:
            return True
        self.changed_until_now()
        self.devices.pass_fence(self.taken)
        return all(one.is_unstaged for one in self.taken)

    def release(self) -> None:
        """End the copy: drop references to the live tensors, and let optimizer steps proceed."""
        self.sources.clear()
        for one in self.taken:
            one.release()
        self.staged.set()

    def forget(self) -> None:
        """Drop the state, because changes after a durable save do not matter.

        If the call of the save waited for the copy, the state is kept, because the next optimizer
        step still looks for changed tensors. Freeing thousands of tensors holds Python's lock for
        milliseconds, so the state is dropped here and not in the next call of `save`.
        """
        if not self.blocking:
            del self.contents, self.snapshot

    def fence_seconds(self) -> float:
        """Return the seconds that the optimizer step waited for the copy, on the CPU and on a GPU.

        Call this method only in a thread of Holdfast, since it changes the current device of the
        thread.
        """
        for device in self.streams if self.taken else ():
            # A new thread starts on the first device, where the query would take memory.
            torch.cuda.set_device(device)
        return self.fence_s + max((one.fence_s for one in self.taken), default=0.0)
