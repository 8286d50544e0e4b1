"""Read the skeleton of a saved state, or rebuild it if DCP wrote the checkpoint without Holdfast.

A skeleton is the nesting of a state, with a flat name in place of each tensor or value.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from holdfast.checkpoint.state.capture import STRUCTURE
from holdfast.checkpoint.state.tree import Skeleton, skeleton_from_paths
from holdfast.core.errors import CheckpointError

Read = Callable[[Mapping[str, None]], Mapping[str, Any]]
"""A function that reads plain values by their flat names."""


def shared_skeleton(metadata: Metadata, read: Read) -> dict[Any, Any]:
    """Return the skeleton of the user's `state` in a checkpoint.

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
    """Read the skeleton that is stored under the flat name `name`; return None if there is none.

    Raises:
        CheckpointError: the value is not a skeleton, or has leaves that the checkpoint lacks.
    """
    if name not in metadata.state_dict_metadata:
        return None
    (skeleton,) = read({name: None})[name]
    unknown = set(leaves(skeleton)) - metadata.state_dict_metadata.keys()
    if unknown or not isinstance(skeleton, dict):
        raise CheckpointError(
            f"{name} names entries that the checkpoint does not have: {sorted(unknown)[:3]}. Take "
            "another checkpoint."
        )
    return skeleton


def leaves(skeleton: Skeleton) -> Iterator[str]:
    """Yield the flat names of the leaves of a skeleton, in order."""
    if isinstance(skeleton, str):
        yield skeleton
    else:
        for part in skeleton.values() if isinstance(skeleton, dict) else skeleton:
            yield from leaves(part)
