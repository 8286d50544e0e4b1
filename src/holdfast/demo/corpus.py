"""Provide real text that every machine has: the source of Python's standard library, as bytes.

A token is a byte, so there is no tokenizer to download, and the vocabulary has 256 tokens. The hash
of a file's name decides whether the file is training or validation text. So the split of the other
files does not change when the library gains a file.
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
_VALIDATION_SHARE: Final = 20  # one file in 20 is for validation
# Tests are half of Python's library, and mostly tables. Packages differ between machines.
_SKIPPED: Final = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Training and validation text, each a uint8 tensor of shape (bytes,); no file is in both.

    Attributes:
        train: the training files, concatenated.
        validation: the validation files, concatenated.
        sha256: a hash of both, which shows whether two runs trained on the same text.
    """

    train: Tensor
    validation: Tensor
    sha256: str


class Sampler:
    """Draw batches of random windows of a text; the position can be saved in a checkpoint.

    Each rank draws different windows, so the state differs by rank and is saved under `per_rank`.
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
        # Not seed + rank: with neighbouring seeds, two runs would draw the same data on some ranks.
        digest = hashlib.sha256(f"{seed}/{rank}".encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return the next inputs and targets, int64 of shape (batch, context).

        The target at each position is the byte that follows the input's byte.
        """
        last = len(self._text) - len(self._offsets) + 1
        starts = torch.randint(last, (self._batch_size, 1), generator=self._generator)
        windows = self._text[starts + self._offsets].long()
        return windows[:, :-1], windows[:, 1:]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches without end, beginning at the current position."""
        while True:
            yield self.draw()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the random generator (uint8), which determines the next batches."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position that `state` holds."""
        self._generator.set_state(state["generator"])


def load_corpus(root: Path | None = None, *, limit_bytes: int = 8_000_000) -> Corpus:
    """Read the source of the standard library, or the `*.py` files under `root`.

    Args:
        root: the folder of the source; None for the standard library.
        limit_bytes: the most bytes of text to read.

    Raises:
        NotFound: there are too few files under `root` for training and validation text.
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
    """Return True if the file with this relative name belongs to the validation text."""
    return (
        int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % _VALIDATION_SHARE == 0
    )


def _source_files(root: Path) -> Iterator[str]:
    """Yield the relative POSIX names of the `*.py` files under `root`.

    The order is the same on every machine.
    """
    for folder, subfolders, files in os.walk(root):  # not rglob: it would enter site-packages
        subfolders[:] = sorted(set(subfolders) - _SKIPPED)
        for file in sorted(files):
            if file.endswith(".py"):
                yield (Path(folder) / file).relative_to(root).as_posix()
