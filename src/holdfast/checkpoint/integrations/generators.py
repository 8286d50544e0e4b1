"""A restore that leaves the random generators alone until training begins where they were saved."""

from collections.abc import MutableMapping
from typing import Any

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.state import random_state


class Generators:
    """Those of a restored checkpoint, held until `put_back`."""

    def __init__(self) -> None:
        """None are held yet."""
        self._held: dict[str, Any] | None = None

    def restore(self, ckpt: Checkpointer, state: MutableMapping[str, Any], **options: Any) -> int:
        """`ckpt.restore`, which does not change this process's generators; see there for what it raises."""
        before = random_state.capture()
        step = ckpt.restore(state, **options)
        if step:
            self._held = random_state.capture()
            random_state.put_back(before)
        return step

    def put_back(self) -> None:
        """Set this process's, once."""
        if self._held is not None:
            random_state.put_back(self._held)
            self._held = None

    @property
    def are_held(self) -> bool:
        """Whether `put_back` would do anything."""
        return self._held is not None
