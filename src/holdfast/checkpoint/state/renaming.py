"""Rename a checkpoint's tensors to the names in the live state, for `Checkpointer.restore`."""

import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint.state.name_map import NameMap, read_name_map, without_wrapper_parts
from holdfast.checkpoint.state.optimizer_order import has_groups
from holdfast.checkpoint.state.tree import Skeleton
from holdfast.core.errors import BadUse

Rename = Mapping[str, Any] | str | os.PathLike[str]
"""A dict from saved names to names in the state, or a name map (see `name_map`), also as a file."""


class Renaming:
    """Apply a name map to tensor names and skeletons.

    A full name begins with an entry of the state, such as `model.`. Names in the map may include
    this entry or leave it out.

    Attributes:
        transposed: flat names of the tensors that were stored transposed; set by `skeleton`.
    """

    def __init__(self, rename: Rename) -> None:
        """Read and check the name map.

        Raises:
            BadUse: `rename` is not a valid name map.
        """
        if isinstance(rename, Mapping):
            are_names = all(isinstance(each, str) for each in rename.values())
            self._map = NameMap(
                {"names": dict(rename)} if are_names else dict(rename), where="rename"
            )
        else:
            self._map = read_name_map(Path(rename))
        self.transposed: set[str] = set()

    def name(self, name: str) -> str | None:
        """Return the name in the live state of a saved tensor; both names include the entry.

        Returns None if the name map drops the tensor.

        Raises:
            BadUse: two rules give the tensor different names.
        """
        return self._name(name)[0]

    def skeleton(
        self, skeleton: Mapping[Any, Any], is_tensor: Callable[[str], bool]
    ) -> dict[Any, Any]:
        """Return a copy of a skeleton in which each tensor has its name in the live state.

        The states of optimizers are unchanged.

        Raises:
            BadUse: two tensors get the same name, or a rule of the map matches no tensor.
        """
        self._map.used.clear()
        renamed: dict[Any, Any] = copy.deepcopy(dict(skeleton))
        moved = self._take_out(renamed, "", is_tensor)
        for nodes, new, leaf in moved:
            _place(nodes, new, leaf, renamed, self._map.where)
        if unused := self._map.unused():
            raise BadUse(
                f"{self._map.where} names tensors that are not in the checkpoint: "
                f"{', '.join(map(repr, unused))}. Correct it."
            )
        return renamed

    def _take_out(
        self, node: dict[Any, Any], prefix: str, is_tensor: Callable[[str], bool]
    ) -> list[tuple[tuple[dict[Any, Any], str], str, str]]:
        """Remove from `node` the tensors that get another name.

        Returns:
            For each of them: its parent and the parent's name, the tensor's new name, and its leaf.
        """
        moved = []
        for key, part in list(node.items()):
            name = f"{prefix}{key}"
            if isinstance(part, dict) and not has_groups(part):
                moved += self._take_out(part, f"{name}.", is_tensor)
            elif isinstance(part, str) and is_tensor(part):
                new, is_transposed = self._name(name)
                if is_transposed:
                    self.transposed.add(part)
                if new != name:
                    del node[key]
                    if new is not None:
                        moved.append(((node, prefix), new, part))
        return moved

    def _name(self, name: str) -> tuple[str | None, bool]:
        """Return a saved tensor's name in the live state, and whether it was stored transposed."""
        entry, _, rest = name.partition(".")
        prefix = self._map.prefix
        for before, old in (
            ((f"{entry}.", rest), ("", name)) if prefix is None else ((f"{entry}.", name),)
        ):
            old = without_wrapper_parts(old)  # noqa: PLW2901 - the same name
            if prefix is not None:
                if not old.startswith(prefix):
                    break
                old = old.removeprefix(prefix)  # noqa: PLW2901
            new, is_transposed = self._map.new_name(old), self._map.is_transposed(old)
            if new != old or is_transposed:
                return name if new == old else new and before + new, is_transposed
        return name, False


def _place(
    node: tuple[dict[Any, Any], str], name: str, leaf: Skeleton, root: dict[Any, Any], where: str
) -> None:
    """Put a renamed leaf into the skeleton `root`.

    The leaf stays in its old parent if the new name begins with the parent's name. Otherwise, it is
    put into the entry with which the new name begins.
    """
    place, prefix = node
    key = name.removeprefix(prefix)
    if not prefix or key == name:
        entry, _, key = name.partition(".")
        place, key = (root.setdefault(entry, {}), key) if key else (root, entry)
    if not isinstance(place, dict) or key in place:
        raise BadUse(
            f"{where} has two tensors of the checkpoint become {name!r}. Name one under `drop`."
        )
    place[key] = leaf
