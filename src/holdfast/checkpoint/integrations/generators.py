"""Restore a checkpoint, but set the random generators later, when training continues."""

from collections.abc import MutableMapping
from typing import Any

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.state import random_state


class Generators:
    """Hold the states of a restored checkpoint's random generators until `put_back`."""

    def __init__(self) -> None:
        """Create the object without any states."""
        self._held: dict[str, Any] | None = None

    def restore(self, ckpt: Checkpointer, state: MutableMapping[str, Any], **options: Any) -> int:
        """Call `ckpt.restore`, but hold the generators' states and do not set them yet."""
        before = random_state.capture()
        step = ckpt.restore(state, **options)
        if step:
            self._held = random_state.capture()
            random_state.put_back(before)
        return step

    def put_back(self) -> None:
        """Set this process's generators to the held states; do nothing if none are held."""
        if self._held is not None:
            random_state.put_back(self._held)
            self._held = None

    @property
    def are_held(self) -> bool:
        """Return True if states of generators are held."""
        return self._held is not None
