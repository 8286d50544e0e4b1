"""Real text that every machine has: the source of Python's own standard library, as bytes.

A token is a byte, so there is no tokenizer to fetch and the vocabulary is 256. Files are split into train and
validation by a hash of their name: the split does not move when the library gains a file.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.core.errors import BadUse, NotFound

VOCABULARY_SIZE: Final = 256
_VALIDATION_SHARE: Final = 20  # one file in so many
# Tests are half of the library and mostly tables; installed packages differ from machine to machine.
_SKIPPED: Final = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text as two tensors of bytes, uint8 of shape (bytes,), with no file in both.

    Attributes:
        train: The files to learn from, one after the other.
        validation: The files to measure on.
        sha256: Hash of both, which proves that two runs saw the same text.
    """

    train: Tensor
    validation: Tensor
    sha256: str


class Sampler:
    """Draws batches of random windows of a text, from a position that is a checkpoint's business.

    Every rank draws its own windows, so the state differs by rank and goes under `per_rank`.
    """

    def __init__(
        self, text: Tensor, *, batch_size: int, context: int, seed: int, rank: int = 0
    ) -> None:
        if len(text) <= context:
            raise BadUse(
                f"the text has {len(text)} bytes, too few for a context of {context}: "
                "give more text or a shorter context"
            )
        self._text = text
        self._batch_size = batch_size
        self._offsets = torch.arange(context + 1)
        # Hashed, because seed + rank would let two runs of neighbouring seeds share a rank's stream.
        digest = hashlib.sha256(f"{seed}/{rank}".encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))

    def draw(self) -> tuple[Tensor, Tensor]:
        """The next inputs and targets, int64 of shape (batch, context); a target is the byte that follows."""
        last = len(self._text) - len(self._offsets) + 1
        starts = torch.randint(last, (self._batch_size, 1), generator=self._generator)
        windows = self._text[starts + self._offsets].long()
        return windows[:, :-1], windows[:, 1:]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches from the position on, without an end."""
        while True:
            yield self.draw()

    def state_dict(self) -> dict[str, Any]:
        """The position in the endless stream of batches: the generator's state, uint8."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the position of `state`."""
        self._generator.set_state(state["generator"])


def load_corpus(root: Path | None = None, *, limit_bytes: int = 8_000_000) -> Corpus:
    """Read the standard library's source, or the `*.py` files under `root`, up to `limit_bytes` in all.

    Raises:
        NotFound: Too few files under `root` for a validation share.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    train, validation = bytearray(), bytearray()
    for name in _source_files(root):
        content = (root / name).read_bytes()
        if len(train) + len(validation) + len(content) > limit_bytes:
            break
        share = validation if is_validation(name) else train
        share += content
    if not train or not validation:
        raise NotFound(
            f"there is no Python source to train and validate on under {root}: "
            "run with a Python that has its standard library's source on disk"
        )
    digest = hashlib.sha256(len(train).to_bytes(8, "big") + train + validation).hexdigest()
    return Corpus(
        train=torch.frombuffer(train, dtype=torch.uint8),
        validation=torch.frombuffer(validation, dtype=torch.uint8),
        sha256=digest,
    )


def is_validation(name: str) -> bool:
    """Whether the file of this relative name is held out from training."""
    return (
        int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % _VALIDATION_SHARE == 0
    )


def _source_files(root: Path) -> Iterator[str]:
    """Relative POSIX names of the `*.py` files under `root`, in an order that no machine changes."""
    for folder, subfolders, files in os.walk(root):  # not rglob: it would enter site-packages
        subfolders[:] = sorted(set(subfolders) - _SKIPPED)
        for file in sorted(files):
            if file.endswith(".py"):
                yield (Path(folder) / file).relative_to(root).as_posix()
