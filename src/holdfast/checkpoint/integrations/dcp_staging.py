"""Stage states for `dcp.async_save` in shared memory, which is reused after each save has ended.

stager = SharedStager()
saved = dcp.async_save(state, checkpoint_id=…, storage_writer=HoldfastWriter(), async_stager=stager)
"""

import copy
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.format.file_image import ALIGNMENT
from holdfast.checkpoint.state.tree import irregular
from holdfast.core.errors import BadUse, SaveFailed


class _Staged(dict[str, Any]):
    """Hold a staged state; its memory is reused only after PyTorch has dropped this object."""


class SharedStager(AsyncStager):
    """Copy states into a few blocks of shared memory, each as large as this rank's state.

    PyTorch's own stagers have one of two faults. They allocate new memory for every save, and a
    copy into new memory takes five times as long. Or they reuse memory while its content is still
    being written to storage. This stager waits until a block is no longer in use.
    """

    _synchronize_after_execute = False

    def __init__(self, *, snapshots: int = 2, timeout_s: float = 600.0) -> None:
        """Create the stager; the first save allocates memory.

        Args:
            snapshots: the number of states that may be in memory at the same time.
            timeout_s: seconds to wait at most until a block is no longer in use.

        Raises:
            BadUse: `snapshots` is below 1.
        """
        if snapshots < 1:
            raise BadUse(f"snapshots is {snapshots!r}; allowed is a whole number from 1 on.")
        self._timeout_s = timeout_s
        self._free: list[torch.Tensor] = [
            torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(snapshots)
        ]
        # Reentrant: the garbage collector may give memory back while a block is taken.
        self._given_back = threading.Condition(threading.RLock())

    def stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a state into shared memory; the original may change afterwards.

        Raises:
            BadUse: the state has a tensor of a kind that cannot be staged.
            SaveFailed: no earlier save has ended within `timeout_s`.
        """
        tensors: dict[int, torch.Tensor] = {}
        _each_tensor(state_dict, tensors)
        places, size_bytes = {}, 0
        for key, tensor in tensors.items():
            places[key] = size_bytes
            size_bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        memory = self._take(size_bytes)
        try:
            copies = {
                key: memory[places[key] : places[key] + tensor.nbytes]
                .view(tensor.dtype)
                .view(tensor.shape)
                for key, tensor in tensors.items()
            }
            staged = _Staged({key: _rebuilt(value, copies) for key, value in state_dict.items()})
            if tensors:
                with torch.no_grad():
                    torch._foreach_copy_(list(copies.values()), list(tensors.values()))
        except BaseException:
            self._give_back(memory)
            raise
        weakref.finalize(staged, self._give_back, memory).atexit = False
        return staged

    def synchronize_staging(self) -> None:
        """Do nothing, since `stage` has already copied everything."""

    def close(self) -> None:
        """Release the memory of all unused blocks."""
        with self._given_back:
            self._free.clear()

    def _take(self, size_bytes: int) -> torch.Tensor:
        with self._given_back:
            if not self._given_back.wait_for(lambda: self._free, self._timeout_s):
                raise SaveFailed(
                    f"No earlier save has ended within {self._timeout_s:g} s, so there is no "
                    "memory for this one. Check the storage, and drop the futures that async_save "
                    "returned for failed saves."
                )
            memory = self._free.pop()
        if memory.numel() < size_bytes:
            memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
        return memory

    def _give_back(self, memory: torch.Tensor) -> None:
        with self._given_back:
            self._free.append(memory)
            self._given_back.notify()


def _each_tensor(value: Any, found: dict[int, torch.Tensor]) -> None:
    """Collect the local tensors of a state, by the `id` of each (possibly distributed) tensor."""
    if isinstance(value, Mapping):
        for item in value.values():
            _each_tensor(item, found)
    elif isinstance(value, list | tuple):
        for item in value:
            _each_tensor(item, found)
    elif isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        if (kind := irregular(local)) is not None:
            raise BadUse(f"A {kind} tensor cannot be staged in shared memory. Use DefaultStager.")
        found[id(value)] = local.detach()


def _rebuilt(value: Any, copies: Mapping[int, torch.Tensor]) -> Any:
    """Return a state with each tensor replaced by its copy."""
    if isinstance(value, Mapping):
        return {key: _rebuilt(item, copies) for key, item in value.items()}
    if isinstance(value, list | tuple):
        kind: Callable[[list[Any]], Any] = list if isinstance(value, list) else tuple
        return kind([_rebuilt(item, copies) for item in value])
    if isinstance(value, DTensor):
        # `from_local` would move the copy to the mesh's device, before the copy is filled.
        return DTensor(copies[id(value)], value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    if isinstance(value, torch.Tensor):
        return copies[id(value)]
    return copy.deepcopy(value)
