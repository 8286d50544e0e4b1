"""Make each update of the state wait until the newest save is copied.

The fence is this wait. Each step of a torch optimizer waits here, and so does
`Checkpointer.before_update`. The fence also finds tensors that are written by code other than an
optimizer, such as a forward pass.
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
"""Changed buffers are copied early only up to 1/8 (this divisor) of the state's bytes."""


class Fence:
    """Make the optimizer steps of one rank wait until the newest save is copied.

    Attributes:
        waited_s: total seconds that optimizer steps have waited for copies.
        was_passed: whether any optimizer step has called this fence. Until then, `save` itself
            waits for the copy, because nothing proves that a later change of the state would wait.
    """

    def __init__(self, shape: PlanCache) -> None:
        """Create the fence; optimizers wait at it only after `install` is called."""
        self._shape = shape
        self._staging: SaveJob | None = None
        self._blocked: SaveJob | None = None
        """The newest save, if its call waited for the copy and no optimizer step followed."""
        self._pid = 0
        self._unhook: Callable[[], None] = lambda: None
        self.waited_s = 0.0
        self.was_passed = False

    def install(self) -> None:
        """Register a hook that runs before each step of every optimizer in this process."""
        self._pid = os.getpid()
        self._unhook = register_optimizer_step_pre_hook(lambda *_: self._before_step()).remove

    def close(self) -> None:
        """Remove the hook from the optimizers."""
        self._unhook()

    def stage(self, job: SaveJob) -> None:
        """Make optimizer steps wait for the copy of `job` from now on."""
        self._staging = job

    def learn_from(self, job: SaveJob) -> None:
        """Let the next optimizer step find the tensors that were written since `job` began.

        The `save` call of `job` must have waited for the copy.
        """
        self._blocked = job

    def forget(self) -> None:
        """Cancel `learn_from`."""
        self._blocked = None

    def before_update(self) -> None:
        """Wait until the newest save is copied; the state may change from then on."""
        self.was_passed = True
        self.await_copy()
        self._learn()

    def _learn(self) -> None:
        """Find the tensors that forward or backward wrote to; later saves copy them in the call.

        These tensors can be found only after a save whose call waited for its copy.
        """
        # Buffers of modules are a small share of the state. If a large share has changed, it was
        # probably loaded from elsewhere, and does not show which tensors forward and backward
        # write.
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
        # A step under CUDA graph capture does not run yet: code that replays the graph calls
        # `before_update`.
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):  # type: ignore[no-untyped-call]
            self.before_update()

    def await_copy(self) -> None:
        """Wait until the bytes of the newest save are copied."""
        job = self._staging
        # In a forked process, the thread that copies is in the parent.
        if job is None or os.getpid() != self._pid:
            return
        began_ns = time.monotonic_ns()
        with job_link().section("save"):
            all_wait = job.pass_fence()
        waited_s = (time.monotonic_ns() - began_ns) / 1e9
        note_phase("checkpoint_stall", began_ns)
        job.fence_s += waited_s
        self.waited_s += waited_s
        if all_wait:  # else an update on another stream has to wait here, too
            self._staging = None


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)
