"""Number the batches of torchtitan's loader, so that harmful batches can be left out.

    config.dataloader = HoldfastDataLoader.Config(loader=config.dataloader)

torchtitan's trainer builds its loader from `config.dataloader`, iterates over it, and passes it to
the checkpoint manager. So a loader that wraps another one receives every batch and takes part in
every save.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.checkpoint.batches.batches import Batches
from holdfast.checkpoint.integrations import missing

try:
    from torchtitan.components.dataloader import BaseDataLoader
except ImportError as error:
    raise missing(error, "torchtitan") from error


class HoldfastDataLoader(BaseDataLoader):
    """Wrap another loader of torchtitan, and leave out the batches that the supervisor names.

    The saved state has the wrapped loader's own entries, and one more with the count of this rank's
    batches. So the wrapped loader can be restored without this class from such a checkpoint, and
    this class can be restored from a checkpoint of the wrapped loader.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Hold the settings of the wrapped loader."""

        loader: BaseDataLoader.Config

    def __init__(self, config: Config, *, dp_rank: int, **parts: Any) -> None:
        """Build the wrapped loader from its settings and the arguments that torchtitan passes."""
        self._loader = config.loader.build(dp_rank=dp_rank, **parts)
        self._batches = Batches(self._loader)
        self._name = f"holdfast_dp_rank_{dp_rank}"

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch, or the rest of an epoch after a restore."""
        return iter(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped loader's state and the count of batches."""
        counted = self._batches.state_dict()
        place = dict(counted["loader"] or {})
        own = place.pop("loader", None)
        return {
            **(self._loader.state_dict() if own is None else own),
            self._name: _packed({**counted, "loader": place or None}),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next loop continue at the saved position."""
        if not state_dict:  # as torchtitan's own loader does
            return
        own = {name: value for name, value in state_dict.items() if name != self._name}
        packed = state_dict.get(self._name)
        if packed is None:  # saved by the wrapped loader alone: earlier batches were not counted
            self._loader.load_state_dict(own)
            return
        counted = _unpacked(packed)
        if counted["loader"] is not None:
            counted["loader"] = {**counted["loader"], "loader": own}
        else:  # saved before the first batch; the wrapped loader may have a position
            self._loader.load_state_dict(own)
        self._batches.load_state_dict(counted)


def _packed(value: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _unpacked(packed: bytes) -> dict[str, Any]:
    value: dict[str, Any] = torch.load(io.BytesIO(packed), weights_only=True)
    return value
