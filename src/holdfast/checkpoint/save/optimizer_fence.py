"""The fence: an update of the state waits until the save that was begun last is copied.

Each step of an optimizer of torch comes by it, and so does `Checkpointer.before_update`. What else has written to the
state by then is learnt here, too.
"""

import os
import time
from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.checkpoint.save.plan_cache import PlanCache
from holdfast.checkpoint.save.save_job import SaveJob
from holdfast.checkpoint.state.tensors import local
from holdfast.core.link import job_link
from holdfast.core.phases import note_phase

_BUFFERS_SHARE: Final = 8
"""Buffers that change before an update are less than such a part of a state."""


class Fence:
    """Of one rank's saves. `waited_s`: how long updates have waited for copies so far, in all.

    `was_passed`: whether what updates the state has ever come by here: else nothing would wait for a copy.
    """

    def __init__(self, shape: PlanCache) -> None:
        """Nothing passes it by itself before it is installed."""
        self._shape = shape
        self._staging: SaveJob | None = None
        self._blocked: SaveJob | None = None
        """The save that was begun last, if it has blocked and no update has come since."""
        self._pid = 0
        self._unhook: Callable[[], None] = lambda: None
        self.waited_s = 0.0
        self.was_passed = False

    def install(self) -> None:
        """Have the steps of all optimizers in this process come by."""
        self._pid = os.getpid()
        self._unhook = register_optimizer_step_pre_hook(lambda *_: self._before_step()).remove

    def close(self) -> None:
        """They do no more."""
        self._unhook()

    def stage(self, job: SaveJob) -> None:
        """From now on updates wait for `job`."""
        self._staging = job

    def learn_from(self, job: SaveJob) -> None:
        """Learn at the next update which tensors were written to since `job`, a save that blocked."""
        self._blocked = job

    def forget(self) -> None:
        """Learn nothing more from the last save."""
        self._blocked = None

    def before_update(self) -> None:
        """Wait until the last save is copied; the state may change from then on."""
        self.was_passed = True
        self.await_copy()
        self._learn()

    def _learn(self) -> None:
        """Have later saves copy the tensors in the call that forward or backward wrote to since a save that blocked."""
        # Buffers are a small share of the state. A large share was loaded by somebody, and teaches nothing.
        job, self._blocked = self._blocked, None
        if job is None or os.getpid() != self._pid:
            return
        leaves, written = job.contents.leaves(None), self._shape.agreed.written
        names = [name for name in job.changed() if name in written]
        if names and _bytes(leaves[name] for name in names) * _BUFFERS_SHARE <= _bytes(
            job.contents.tensors
        ):
            self._shape.copy_early(job.contents, names)

    def _before_step(self) -> None:
        # A step that is captured is none yet: whoever replays it calls `before_update`.
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):  # type: ignore[no-untyped-call]
            self.before_update()

    def await_copy(self) -> None:
        """Wait until the bytes of the save that was begun last are copied."""
        job = self._staging
        if (
            job is None or os.getpid() != self._pid
        ):  # forked: the thread that copies is another process's
            return
        began_ns = time.monotonic_ns()
        with job_link().section("save"):
            all_wait = job.pass_fence()
        waited_s = (time.monotonic_ns() - began_ns) / 1e9
        note_phase("checkpoint_stall", began_ns)
        job.fence_s += waited_s
        self.waited_s += waited_s
        if all_wait:  # else an update on another stream comes here again
            self._staging = None


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)
