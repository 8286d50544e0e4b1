"""An attribute of somebody else's object, replaced for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
    """Within the block `owner` has `by` under `name`; afterwards what it had, its own or its class's."""
    attributes = vars(owner)
    own = {name: attributes[name]} if name in attributes else {}
    attributes[name] = by
    try:
        yield
    finally:
        attributes.pop(name, None)
        attributes.update(own)
