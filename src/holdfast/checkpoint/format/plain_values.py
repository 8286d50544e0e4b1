"""Store one plain value as DCP does, and read it without running code from the file."""

import io
from typing import Any

import torch

from holdfast.core.errors import CheckpointError


def serialized(value: Any) -> bytes:
    """Serialize a plain value, such that `torch.load` ignores any bytes that follow.

    The bytes are stored in a slot, which may be larger than the value.
    """
    written = io.BytesIO()
    # The ZIP form would not do, because its reader expects the end of the archive at the end of the
    # slot.
    torch.save(value, written, _use_new_zipfile_serialization=False)
    return written.getvalue()


def load_plain(name: str, value: io.BytesIO) -> Any:
    """Read a plain value as PyTorch stored it, without running code from it.

    Raises:
        CheckpointError: the bytes do not store a plain value.
    """
    try:
        # Empty bytes are pickled as a call of `bytes`, which does no harm.
        with torch.serialization.safe_globals([bytes]):
            return torch.load(value, map_location="cpu", weights_only=True)
    except Exception as error:  # a forged file may raise any exception
        raise CheckpointError(
            f"{name!r} is not a plain value; reading it could run code from the file, so it was not read. "
            "Leave its top-level entry out of the state to restore the rest."
        ) from error
