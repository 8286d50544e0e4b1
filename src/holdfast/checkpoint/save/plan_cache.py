"""Keep the parts that saves of one state shape share: plan, memory and the choice of early copies.

A plan assigns each tensor to a rank and an offset. Early copies are made in the call of `save`, of
tensors that may change before the optimizer's step.
"""

import functools
import itertools
import logging
from collections.abc import Iterable
from typing import Any, Final

import torch

from holdfast.checkpoint.config import CheckpointerConfig
from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.format.file_image import slot_bytes
from holdfast.checkpoint.format.plain_values import serialized
from holdfast.checkpoint.save.save_job import SaveJob
from holdfast.checkpoint.snapshot.buffer_pool import BufferPool
from holdfast.checkpoint.snapshot.copy import ChangeTracker, live_digests, overlong, sources
from holdfast.checkpoint.snapshot.early_copy import (
    BUDGET_BYTES,
    EarlyCopies,
    changes_of,
    choose_early,
)
from holdfast.checkpoint.snapshot.gpu.devices import Devices
from holdfast.checkpoint.snapshot.gpu.memory import room_bytes
from holdfast.checkpoint.snapshot.ownership import OptimizerTensors
from holdfast.checkpoint.snapshot.plan import Plan, make_plan
from holdfast.checkpoint.state.capture import Contents
from holdfast.checkpoint.state.tensors import local
from holdfast.checkpoint.state.tree import KIND, LiveTensors
from holdfast.checkpoint.writer.client import Writer

_logger = logging.getLogger("holdfast")
SHARD_BYTES: Final = 4 << 30


class PlanCache:
    """Keep the plan until the shape of the state changes on some rank."""

    def __init__(
        self,
        config: CheckpointerConfig,
        writer: Writer,
        seats: BufferPool,
        optimizers: OptimizerTensors,
    ) -> None:
        """Create the cache; the first save makes the plan."""
        self._config = config
        self._writer = writer
        self._seats = seats
        self._plan: Plan | None = None
        self._devices: Devices | None = None
        self._optimizers = optimizers
        self._early: tuple[list[int], bool] = [], False
        self._chosen_with = 0
        """The number of known optimizers when `_early` was chosen."""
        self._early_copies = EarlyCopies()
        self._unsteady: set[str] = set()
        self._kinds: list[Any] = []
        self._rooms: list[tuple[int, int]] = []
        self.shard_bytes = SHARD_BYTES
        """The largest size of a file in bytes; a file with a single larger tensor exceeds it."""
        self.is_outdated = False
        """Whether some rank's state has another shape, so that the next save makes a new plan."""
        self.layout = 0
        """The number of the plan's layout in the writing process."""

    @property
    def is_on_gpus(self) -> bool:
        """Return True if GPUs copy part of the state."""
        return bool(self._devices)

    @property
    def agreed(self) -> Plan:
        """Return the plan that all ranks have agreed on."""
        assert self._plan is not None, "all have agreed on one"
        return self._plan

    def snapshot(self, contents: Contents) -> ChangeTracker:
        """Start tracking changes of tensors, and copy those that may change before an update."""
        tensors = contents.tensors
        if self._plan is not None and len(self._optimizers) != self._chosen_with:
            self._choose_early(contents)
        places, must_block = self._early
        try:
            return ChangeTracker(
                tensors, self._early_copies.take(tensors, places), must_block=must_block
            )
        except torch.cuda.OutOfMemoryError:
            _logger.warning(
                "A GPU has no memory for copies of what changes before an update: this save waits instead."
            )
            return ChangeTracker(tensors, {}, must_block=True)

    def take(self, job: SaveJob, *, overlaps: bool) -> bool:
        """Copy and digest the tensors that must be read before the call of `save` returns.

        Args:
            job: the save.
            overlaps: whether training continues during the rest of the copy.

        Returns:
            True if the plan fits the state as far as the call can check. The staging thread checks
            the rest.
        """
        if self._plan is None or self.is_outdated:
            return False
        devices = job.devices = self._devices
        tensors, copied = job.contents.tensors, job.snapshot.copied
        if devices:
            job.taken = devices.take(tensors, copied, job.streams, overlaps=overlaps)
            if not job.taken:
                return False
        if self._config.attest and not (devices and devices.leaves_none(tensors, copied)):
            if not self.fits(job):
                return False
            self.digest_rest(job)
            return True
        # With GPUs, a save whose state does not fit the plan is skipped by the staging thread. So
        # the call checks for values that have grown. Without GPUs, the staging thread makes a new
        # plan. The call then checks only the kinds of the tensors, because the kinds decide which
        # tensors the call copies.
        return self._has_room(job.contents) if devices else _kinds(tensors) == self._kinds

    def fits(self, job: SaveJob) -> bool:
        """Check that the plan fits the state and the GPU copies; if so, set `job.sources`.

        Returns:
            Whether the plan fits. `job.sources` has the tensor or value to copy to each place of
            the plan.
        """
        plan = self._plan
        if plan is None or self.is_outdated or not plan.fits(job.contents):
            return False
        job.sources = job.sources or self._sources(plan, job)
        return not overlong(plan, job.sources) and (
            not job.devices or job.devices.has_taken(job.taken, job.sources)
        )

    def digest_rest(self, job: SaveJob) -> None:
        """Digest on the CPU the tensors that no GPU digests, if required and not yet done."""
        if self._config.attest and job.digests is None:
            first = job.devices.first_digested_on_host if job.devices else 0
            job.digests = live_digests(self.agreed, job.sources, first=first)

    def plan_anew(self, job: SaveJob, ranks: Ranks) -> None:
        """Make a plan for the state of `job`, and copy and digest the state by it. Collective.

        No other save may be in flight.
        """
        plan = make_plan(
            ranks,
            job.contents,
            shard_bytes=self.shard_bytes,
            room_bytes=self._room_bytes,
            owned=functools.partial(self._owned, job.contents),
            is_spread=self._config.replicas != "rank0",
        )

        def prepare() -> None:
            self._release()
            self.layout = self._writer.share_layout(plan.layout)
            self._plan, self.is_outdated = plan, False
            job.sources, job.digests = self._sources(plan, job), None
            if plan.on_devices:
                config = self._config
                self._devices = Devices(
                    plan, job.contents, attest=config.attest, max_bytes=config.max_device_bytes
                )
            self._kinds = _kinds(job.contents.tensors)
            self._choose_early(job.contents)
            self._rooms = [_room(value) for value in job.contents.tensors.values]
            self.take(job, overlaps=False)

        ranks.together(prepare)

    def prepare(self) -> None:
        """Allocate the buffer of the next save, while training continues."""
        if self._plan is not None:
            self._seats.prepare(self._plan)

    def copy_early(self, contents: Contents, names: Iterable[str]) -> None:
        """From now on, copy the tensors `names` in the call of `save`."""
        self._unsteady = self._unsteady.union(names)
        self._choose_early(contents)

    def close(self, *, in_good_order: bool) -> None:
        """Release the plan and its memory.

        If training does not end `in_good_order`, the writing process keeps its buffers, from which
        a restarted trainer can restore.
        """
        if in_good_order:
            self._release()
            return
        self._release_devices()
        self._seats.forget()
        self._plan = None

    def _owned(self, contents: Contents) -> frozenset[str]:
        self._optimizers.add(
            each for each in contents.objects if isinstance(each, torch.optim.Optimizer)
        )
        leaves = contents.leaves(None)
        names = [name for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)]
        return frozenset(
            itertools.compress(names, self._optimizers.owned([leaves[name] for name in names]))
        )

    def _room_bytes(self, device: torch.device) -> float:
        """Return the GPU bytes for packing, including those that the former plan will release."""
        room = room_bytes(device) + (self._devices.packed_bytes(device) if self._devices else 0)
        return (
            room
            if self._config.max_device_bytes is None
            else min(room, self._config.max_device_bytes)
        )

    def _sources(self, plan: Plan, job: SaveJob) -> list[Any]:
        return sources(plan, job.contents.leaves(plan.structure), job.snapshot)

    def _choose_early(self, contents: Contents) -> None:
        changes = changes_of(contents, self._optimizers, self._unsteady)
        self._chosen_with = len(self._optimizers)
        # One assignment, since a call in another thread may be reading the former value.
        self._early = choose_early(
            contents.tensors,
            changes,
            attest=self._config.attest,
            but_on=[*self._devices] if self._devices else (),
            packed=self._devices.packed_places() if self._devices else (),
            budget_bytes=BUDGET_BYTES,
        )

    def _has_room(self, contents: Contents) -> bool:
        """Return True if the plan has a slot for each plain value, with room for values that grew.

        Only values whose length has grown are checked. The staging thread checks the other values,
        which may need more bytes at the same length, such as a number or an item of a list.
        """
        values = contents.tensors.values
        return len(values) == len(self._rooms) and all(
            _length(value) <= length or len(serialized(value)) <= most_bytes
            for value, (length, most_bytes) in zip(values, self._rooms, strict=True)
        )

    def _release(self) -> None:
        self._release_devices()
        numbers = self._seats.forget()
        if self._plan is not None:
            self._writer.forget(numbers, [self.layout])
        self._plan = None

    def _release_devices(self) -> None:
        if self._devices is not None:
            self._devices.close()
        self._devices = None


def _kinds(tensors: LiveTensors) -> list[Any]:
    return list(map(KIND, tensors if tensors.are_plain else map(local, tensors)))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else -1


def _room(value: Any) -> tuple[int, int]:
    """Return the length of a value now, and the number of bytes that its slot can hold."""
    return _length(value), slot_bytes(len(serialized(value)))
