"""List the tensors of a folder's safetensors files from their headers, without slow imports."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.errors import BadUse

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorPlace:
    """A tensor in a safetensors file, as the file's header describes it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int

    def kind(self) -> tuple[str, tuple[int, ...]]:
        """Return the tensor's dtype and shape, which must stay equal in a swap."""
        return self.dtype, self.shape


def tensors_of(folder: Path) -> dict[str, TensorPlace]:
    """Return a folder's tensors by name, from the headers of its safetensors files.

    Raises:
        BadUse: there are no tensors, or a file cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            names = json.loads(index.read_bytes())["weight_map"].values()
            paths = sorted({folder / name for name in names})
        else:
            paths = sorted(folder.glob("*.safetensors"))
        found: dict[str, TensorPlace] = {}
        for path in paths:
            found |= _header(path)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise BadUse(
            f"The weights of {folder} cannot be read: {error}. Copy the checkpoint again."
        ) from error
    if not found:
        pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(
            path.name for path in folder.glob("*.pt")
        )
        if pickles:
            raise BadUse(
                f"{folder} has its weights as {pickles[0]}, a pickle, which may run code. "
                "Save the model with save_pretrained of transformers 5, which writes safetensors."
            )
        raise BadUse(
            f"{folder} holds no *.safetensors file. Give the folder of a Hugging Face model."
        )
    return found


def _header(path: Path) -> dict[str, TensorPlace]:
    """Read the header of a safetensors file.

    The format (https://github.com/huggingface/safetensors#format) is the header's length, the
    header as JSON, and the data.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} is not a safetensors file")
        entries = json.loads(file.read(length))
    places = {}
    for name, entry in entries.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            places[name] = TensorPlace(path, entry["dtype"], tuple(entry["shape"]), end - begin)
    return places
