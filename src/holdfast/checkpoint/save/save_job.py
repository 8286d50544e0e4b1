"""One save of one rank, from the call until it has ended."""

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
    """What is known of it so far.

    Attributes:
        order: what the writing process is to write.
        began_s: when it was called, by the monotonic clock.
        must: it is not skipped.
        metrics: of the step, as they were given; they are read in the thread.
        blocking: the call waits until it is copied.
        streams: that the call was made on.
        boundaries: of those streams.
        contents: the state.
        snapshot: what tells whether it has changed.
        sources: what each blob of the image is copied from.
        devices: the GPUs that some are on.
        taken: what is taken there.
        digests: of what is live on the host; None: nothing is attested.
        error: why this rank could not take stock.
        failure: why it could not copy.
        seat: where it is copied to.
        generation: of the arena there.
        outcome: how it ends; None: it is skipped.
        staged: set once the state may change, where the fence was passed.
        call_s: how long the call took.
        fence_s: how long the CPU waited at the fence.
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
        """The names of the tensors that were written to since the call, but for those that it copied."""
        places = self.snapshot.changed()
        if not places:
            return []
        ids = {id(self.contents.tensors[place]) for place in places}
        leaves = self.contents.leaves(None)
        settled = self.devices.settled(self.taken) if self.devices else ()
        return [name for name, leaf in leaves.items() if id(leaf) in ids and name not in settled]

    def changed_until_now(self) -> list[str]:
        """The same; from now on they may change, and whoever asks later hears of nothing else."""
        with self._watching:
            if self._changed is None:
                self._changed = self.changed()
        return self._changed

    def began_on(self, streams: Streams) -> None:
        """Remember where the streams of the training are: at the end of a step."""
        self.streams = streams
        self.boundaries = [stream.record_event() for stream in streams.values()]

    def await_boundary(self) -> None:
        """In a thread: work on its GPU, after all that the training has ordered until the call."""
        for device, boundary in zip(self.streams, self.boundaries, strict=True):
            torch.cuda.set_device(device)  # a thread begins on the first one
            torch.cuda.current_stream(device).wait_event(boundary)

    def pass_fence(self) -> bool:
        """Return once the state may change: at once, where a GPU does the waiting.

        Returns:
            Whether there is nothing left that an update on another stream would have to wait for.
        """
        self.staged.wait()
        if not self.devices or not self.taken:
            return True
        self.changed_until_now()
        self.devices.pass_fence(self.taken)
        return all(one.is_unstaged for one in self.taken)

    def release(self) -> None:
        """Nothing of it is copied any more."""
        self.sources.clear()
        for one in self.taken:
            one.release()
        self.staged.set()

    def forget(self) -> None:
        """It is saved: changes do not matter any more, but to the update that learns from a save that blocked.

        Thousands of tensors let go take milliseconds of Python's lock, which the call after it would wait for.
        """
        if not self.blocking:
            del self.contents, self.snapshot

    def fence_seconds(self) -> float:
        """How long the update waited, on the CPU or on a GPU. In a thread of ours."""
        for device in self.streams if self.taken else ():
            torch.cuda.set_device(
                device
            )  # a thread begins on the first one, where its question would take memory
        return self.fence_s + max((one.fence_s for one in self.taken), default=0.0)
