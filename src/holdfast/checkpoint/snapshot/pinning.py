"""An arena's memory, page-locked: a GPU writes into it by itself, at the rate of its bus."""

import contextlib
import logging
import time
from typing import Any, Final

import torch

_logger = logging.getLogger("holdfast")
_PORTABLE: Final = 1
"""`cudaHostRegisterPortable`: for all of the process's GPUs."""


def pin(memory: torch.Tensor) -> bool:
    """Lock the pages of `memory`, a CPU tensor of bytes, until `unpin`; whether that could be done.

    Without it copies are slower, and each holds up the thread that makes it.
    """
    began_s = time.monotonic()
    try:
        code = _runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)
        torch.cuda.check_error(int(code))
    except RuntimeError as error:
        _forget_error()
        _logger.warning(
            "%s bytes of a snapshot's memory cannot be pinned (%s): copies from the GPU will be slow. Give the job "
            "more memory, or save less of its state on this rank.",
            f"{memory.nbytes:,}",
            error,
        )
        return False
    _logger.debug("%d bytes were pinned in %.2f s", memory.nbytes, time.monotonic() - began_s)
    return True


def unpin(memory: torch.Tensor) -> None:
    """Undo `pin`, before the memory is unmapped."""
    with contextlib.suppress(RuntimeError):  # the GPU has failed: nothing can be undone
        torch.cuda.check_error(int(_runtime().cudaHostUnregister(memory.data_ptr())))
        return
    _forget_error()


def _forget_error() -> None:
    """CUDA keeps a thread's last error until it is asked for, which PyTorch does at the next kernel: let it be this."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
