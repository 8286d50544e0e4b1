"""The skeleton of a saved state: as it was stored, or made of the paths that DCP keeps of one that it wrote alone."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from holdfast.checkpoint.state.capture import STRUCTURE
from holdfast.checkpoint.state.tree import Skeleton, skeleton_from_paths
from holdfast.core.errors import CheckpointError

Read = Callable[[Mapping[str, None]], Mapping[str, Any]]
"""Plain values by their flat names."""


def shared_skeleton(metadata: Metadata, read: Read) -> dict[Any, Any]:
    """That of the state.

    Raises:
        CheckpointError: see `stored_skeleton`.
    """
    stored = stored_skeleton(STRUCTURE, metadata, read)
    if stored is not None:
        return stored
    paths = metadata.planner_data or {}
    return skeleton_from_paths(
        {name: paths.get(name, (name,)) for name in metadata.state_dict_metadata}
    )


def stored_skeleton(name: str, metadata: Metadata, read: Read) -> dict[Any, Any] | None:
    """The one under `name`, whose every leaf the metadata knows; None if there is none.

    Raises:
        CheckpointError: it is no skeleton of what is there.
    """
    if name not in metadata.state_dict_metadata:
        return None
    (skeleton,) = read({name: None})[name]
    unknown = set(leaves(skeleton)) - metadata.state_dict_metadata.keys()
    if unknown or not isinstance(skeleton, dict):
        raise CheckpointError(
            f"{name} names what the checkpoint does not hold: {sorted(unknown)[:3]}. Take another checkpoint."
        )
    return skeleton


def leaves(skeleton: Skeleton) -> Iterator[str]:
    """The flat names in it, as they come."""
    if isinstance(skeleton, str):
        yield skeleton
    else:
        for part in skeleton.values() if isinstance(skeleton, dict) else skeleton:
            yield from leaves(part)
