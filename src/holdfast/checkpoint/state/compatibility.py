"""Check whether a live state fits a checkpoint, and fill it with the values that were read.

`Fit` only compares, so a state that does not fit stays unchanged. `fill` stores the values.
"""

import copy
import functools
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.state.tensors import local
from holdfast.checkpoint.state.tree import (
    PLAIN_TENSORS,
    Skeleton,
    irregular,
    is_nested_list,
    without_wrappers,
)


class _Absent:
    """Define the type of `ABSENT`, which represents an entry that the state does not have yet."""


ABSENT = _Absent()


class Fit:
    """Compare a live state with a checkpoint, and collect the tensors to read and the differences.

    Attributes:
        wanted: for each entry to read, by flat name, the tensor to read into, or None for a plain
            value.
        problems: one clause for each difference that prevents the restore, with the name of the
            entry.
        same: pairs of entries that share one tensor in the state, such as tied weights. Each entry
            is given as (name, flat name). The second of a pair is read into a separate tensor, so
            that both saved tensors can be compared.
        missing: names of entries that only the state has.
        unexpected: names of entries that only the checkpoint has; they are not read.
    """

    def __init__(
        self, saved: Mapping[str, Any], *, strict: bool = True, transposed: Collection[str] = ()
    ) -> None:
        """Store the checkpoint's side of the comparison; `fit` compares.

        Args:
            saved: DCP's metadata of each saved entry, by flat name.
            strict: whether both sides must have the same names and types. If not, differing names
                are recorded as `missing` and `unexpected`, and floating-point types may differ.
            transposed: flat names of the tensors that were stored transposed.
        """
        self._saved = saved
        self._transposed = transposed
        self.strict = strict
        self._first: dict[tuple[Any, ...], tuple[str, str]] = {}
        self.wanted: dict[str, torch.Tensor | None] = {}
        self.problems: list[str] = []
        self.same: list[tuple[tuple[str, str], tuple[str, str]]] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._converted: list[tuple[str, torch.Tensor | None]] = []

    def has_plain(self, flat: str) -> bool:
        """Return True if the checkpoint has a plain value with the flat name `flat`."""
        return isinstance(self._saved.get(flat), BytesStorageMetadata)

    def saved_shape(self, flat: str) -> tuple[int, ...] | None:
        """Return the shape of the saved tensor with the flat name `flat`; None if there is none."""
        saved = self._saved.get(flat)
        return tuple(saved.size) if isinstance(saved, TensorStorageMetadata) else None

    def saved_shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of the saved tensor with this name; None if there is none.

        Name parts of wrappers such as DDP and FSDP are removed from the saved names before the
        search.
        """
        flat = self._unwrapped.get(name)
        return None if flat is None else self.saved_shape(flat)

    @functools.cached_property
    def _unwrapped(self) -> dict[str, str]:
        return {without_wrappers(flat): flat for flat in self._saved}

    def fit(self, name: str, target: Any, skeleton: Skeleton, *, adds: bool = False) -> Skeleton:
        """Compare one entry of the state, `target`, with the same entry of the checkpoint.

        The checkpoint's entry is described by `skeleton`, its nesting with a flat name in place of
        each tensor or value. Dicts and lists are compared recursively:

        - A key that only the checkpoint has is read and added to the state's dict. If not `strict`,
          it is added only if that dict is empty or `adds` is True.
        - A key that only the state has is a problem. If not `strict`, it is recorded in `missing`.
        - A plain value of the state matches any saved value.

        Returns:
            The part of the skeleton to read.
        """
        if isinstance(skeleton, str):
            self._fit_leaf(name, target, skeleton)
            return skeleton
        if isinstance(target, torch.Tensor):
            self.problems.append(
                f"{name!r} is a tensor in the state and a {_kind(skeleton)} in the checkpoint"
            )
            return skeleton
        if isinstance(skeleton, dict):
            return self._fit_dict(name, target, skeleton, adds=adds)
        return self._fit_list(name, target, skeleton, adds=adds)

    def convert(self, loaded: dict[str, Any]) -> None:
        """Copy into the state the tensors that were saved with another type, or transposed."""
        with torch.no_grad():
            for flat, target in self._converted:
                value = loaded[flat].t() if flat in self._transposed else loaded[flat]
                loaded[flat] = value.contiguous() if target is None else target.copy_(value)

    def adopt(self, name: str, target: Any, skeleton: Skeleton) -> None:
        """Record all entries in `skeleton` as wanted, without comparing names and shapes.

        This is for an object whose own `load_state_dict` validates its state. Call this method
        after all calls of `fit`. A saved tensor is read directly into the tensor in `target` if
        size and type are equal and no other entry is read into that tensor. Otherwise, it is read
        into a new tensor.
        """
        if isinstance(skeleton, dict):
            present = target if isinstance(target, Mapping) else {}
            for key, part in skeleton.items():
                self.adopt(f"{name}.{key}", present.get(key, ABSENT), part)
        elif isinstance(skeleton, list):
            items = target if isinstance(target, list) else []
            for index, part in enumerate(skeleton):
                self.adopt(f"{name}.{index}", items[index] if index < len(items) else ABSENT, part)
        elif not isinstance(saved := self._saved[skeleton], TensorStorageMetadata):
            self.wanted[skeleton] = None
        elif (kind := _irregular(saved)) is not None:
            self.problems.append(f"{name!r} is a {kind} tensor, which cannot be restored")
        elif (
            not isinstance(target, torch.Tensor)
            or irregular(target) is not None
            or skeleton in self._transposed
        ):
            self._make_room(skeleton, saved)
        elif (target.size(), target.dtype) != (saved.size, saved.properties.dtype):
            self.wanted[skeleton] = _room(
                saved, "cpu" if isinstance(target, DTensor) else target.device
            )
        elif _is_expanded(local(target)) or (
            target.numel() and self._first_of(target, name, skeleton)
        ):
            self.wanted[skeleton] = torch.empty_like(target)
        else:
            self.wanted[skeleton] = target

    def require(self, name: str, target: Any) -> None:
        """Record that the checkpoint lacks the entry `name` of the state.

        If `strict`, this is a problem, unless the entry `target` is an empty dict.
        """
        if not self.strict:
            self.missing += _leaf_names(name, target)
        elif not (isinstance(target, Mapping) and not target):
            self.problems.append(f"the checkpoint has no {name!r}")

    def _fit_leaf(self, name: str, target: Any, flat: str) -> None:
        saved = self._saved[flat]
        is_tensor = isinstance(saved, TensorStorageMetadata)
        kind = _irregular(saved) if is_tensor else None
        if isinstance(target, Mapping) or is_nested_list(target):
            self.problems.append(
                f"{name!r} is a {_kind(target)} in the state and one value in the checkpoint"
            )
        elif kind is not None or (
            isinstance(target, torch.Tensor) and (kind := irregular(target)) is not None
        ):
            self.problems.append(f"{name!r} is a {kind} tensor, which cannot be restored")
        elif not isinstance(target, torch.Tensor) and is_tensor:
            self._make_room(flat, saved)
        elif not isinstance(target, torch.Tensor):
            self.wanted[flat] = None
        elif not is_tensor:
            self.problems.append(
                f"{name!r} is a tensor in the state and a plain value in the checkpoint"
            )
        elif flat in self._transposed and isinstance(target, DTensor):
            self.problems.append(
                f"{name!r} is sharded, and a transposed tensor cannot be restored into it"
            )
        elif (target.size(), target.dtype) != self._kind_of(target, flat, saved):
            self.problems.append(
                f"{name!r} is {_shape(target.size(), target.dtype)} in the state and "
                f"{_shape(*self._kind_of(None, flat, saved))} in the checkpoint"
            )
        elif target.dtype != saved.properties.dtype or flat in self._transposed:
            # A DTensor in CPU memory would need a device mesh of the CPU.
            is_sharded = isinstance(target, DTensor)
            self.wanted[flat] = (
                torch.empty_like(target, dtype=saved.properties.dtype)
                if is_sharded
                else _room(saved)
            )
            self._converted.append((flat, target))
        elif type(own := local(target)) not in PLAIN_TENSORS:
            self.wanted[flat] = target
        elif _is_expanded(own):
            self.problems.append(
                f"{name!r} has elements that share memory, as after expand: clone() it first"
            )
        elif own.numel() and (first := self._first_of(target, name, flat)):
            self.same.append((first, (name, flat)))
            # A sharded tensor needs a target that is sharded in the same way.
            self.wanted[flat] = _room(saved) if own is target else torch.empty_like(target)
        else:
            self.wanted[flat] = target

    def _kind_of(
        self, target: torch.Tensor | None, flat: str, saved: TensorStorageMetadata
    ) -> tuple[torch.Size, torch.dtype]:
        """Return the size and dtype that a saved tensor has after its conversion for `target`."""
        size = torch.Size(saved.size[::-1]) if flat in self._transposed else saved.size
        dtype = saved.properties.dtype
        if (
            target is not None
            and not self.strict
            and target.dtype.is_floating_point
            and dtype.is_floating_point
        ):
            dtype = target.dtype
        return size, dtype

    def _make_room(self, flat: str, saved: TensorStorageMetadata) -> None:
        self.wanted[flat] = _room(saved)
        if flat in self._transposed:
            self._converted.append((flat, None))

    def _first_of(self, target: torch.Tensor, name: str, flat: str) -> tuple[str, str] | None:
        """Return an earlier entry with the same tensor (tied weights); None if there is none."""
        own = local(target)
        place: tuple[Any, ...] = (own.device, own.data_ptr(), own.dtype, own.size(), own.stride())
        if isinstance(target, DTensor):
            place = (*place, target.size(), target.placements, target.device_mesh)
        first = self._first.setdefault(place, (name, flat))
        return None if first[1] == flat else first

    def _fit_dict(
        self, name: str, target: Any, skeleton: dict[Any, Any], *, adds: bool
    ) -> Skeleton:
        if is_nested_list(target) or (
            isinstance(target, Mapping) and not isinstance(target, MutableMapping)
        ):
            self.problems.append(
                f"{name!r} is a {_kind(target)} in the state and a dict in the checkpoint"
            )
            return skeleton
        present: Mapping[Any, Any] = target if isinstance(target, Mapping) else {}
        unknown = [key for key in present if key not in skeleton]
        if unknown and _unwrapped(present) == _unwrapped(skeleton):
            is_wrapped = _unwrapped(unknown) != set(unknown)
            one, other, advice = (
                ("state", "checkpoint", "pass the model that is inside the wrapper")
                if is_wrapped
                else ("checkpoint", "state", "pass the model in the wrapper that it was saved in")
            )
            self.problems.append(
                f"{name!r} has the names of a wrapped model in the {one} and not in the {other}: "
                f"{advice}"
            )
            return skeleton
        for key in unknown:
            self.require(f"{name}.{key}", present[key])
        if not self.strict and present and not adds:
            beyond = {key: part for key, part in skeleton.items() if key not in present}
            self.unexpected += _leaf_names(name, beyond)
            skeleton = {key: part for key, part in skeleton.items() if key in present}
        return {
            key: self.fit(f"{name}.{key}", present.get(key, ABSENT), part, adds=adds)
            for key, part in skeleton.items()
        }

    def _fit_list(self, name: str, target: Any, skeleton: list[Any], *, adds: bool) -> Skeleton:
        if isinstance(target, Mapping):
            self.problems.append(f"{name!r} is a dict in the state and a list in the checkpoint")
            return skeleton
        present = target if isinstance(target, list) else []
        if len(present) > len(skeleton):
            self.problems.append(
                f"{name!r} has {len(present)} items, the checkpoint has {len(skeleton)}"
            )
        return [
            self.fit(
                f"{name}.{index}",
                present[index] if index < len(present) else ABSENT,
                part,
                adds=adds,
            )
            for index, part in enumerate(skeleton)
        ]


def fill(
    target: Any, skeleton: Skeleton, loaded: Mapping[str, Any], filled: set[int] | None = None
) -> Any:
    """Store the values that were read from a checkpoint in `target`, in place if possible.

    Args:
        target: an entry of the state. If a saved tensor was read directly into a tensor of
            `target`, that tensor is in `loaded`.
        skeleton: the checkpoint's skeleton of the entry.
        loaded: the values that were read, by flat name.
        filled: the `id`s of the state's containers that are already filled. If such a container
            occurs a second time in the state, it is replaced by a new one there.

    Returns:
        The value to store in the place of `target`.
    """
    filled = set() if filled is None else filled
    if id(target) in filled:
        target = ABSENT
    elif isinstance(target, MutableMapping | list):
        filled.add(id(target))
    if isinstance(skeleton, dict):
        entries = target if isinstance(target, MutableMapping) else {}
        for key, part in skeleton.items():
            entries[key] = fill(entries.get(key, ABSENT), part, loaded, filled)
        return entries
    if isinstance(skeleton, list):
        items = target if isinstance(target, list) else []
        items[:] = [
            fill(items[index] if index < len(items) else ABSENT, part, loaded, filled)
            for index, part in enumerate(skeleton)
        ]
        return items
    value = loaded[skeleton]
    if type(target) is list and type(value) is list:
        target[:] = value
        return target
    return value


def rebuilt(
    target: Any, skeleton: Skeleton, loaded: Mapping[str, Any], *, lost_empty: bool = False
) -> Any:
    """Return the values that were read from a checkpoint, in new containers.

    The containers have the same types as in `target`, because a checkpoint does not record types of
    dicts, such as Counter, or attributes of dicts, such as the `_metadata` of a module's state. A
    checkpoint that DCP wrote without Holdfast does not record empty dicts either. So with
    `lost_empty`, the empty dicts of `target` are kept.
    """
    into = functools.partial(rebuilt, loaded=loaded, lost_empty=lost_empty)
    if isinstance(skeleton, dict):
        present: Any = target if isinstance(target, Mapping) else {}
        entries: Any = copy.copy(present) if isinstance(present, dict) else {}
        entries.clear()
        for key, part in skeleton.items():  # not update(), which adds up counts in a Counter
            entries[key] = into(present.get(key, ABSENT), part)
        if lost_empty:
            entries.update(
                {
                    key: part
                    for key, part in present.items()
                    if isinstance(part, Mapping) and not part and key not in skeleton
                }
            )
        return entries
    if isinstance(skeleton, list):
        items = target if isinstance(target, list) else []
        return [
            into(items[index] if index < len(items) else ABSENT, part)
            for index, part in enumerate(skeleton)
        ]
    return loaded[skeleton]


def _room(saved: TensorStorageMetadata, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return a new tensor with the shape and dtype of a saved tensor, and undefined values."""
    return torch.empty(saved.size, dtype=saved.properties.dtype, device=device)


def _is_expanded(own: torch.Tensor) -> bool:
    """Return True if several elements share one memory location, as in the result of `expand`."""
    return any(
        stride == 0 and size > 1 for stride, size in zip(own.stride(), own.size(), strict=True)
    )


def _irregular(saved: TensorStorageMetadata) -> str | None:
    """Name the kind of a saved tensor, such as sparse, by its metadata; see `tree.irregular`."""
    if saved.properties.layout is not torch.strided:
        return "sparse"
    return irregular(torch.empty(0, dtype=saved.properties.dtype, device="cpu"))


def _unwrapped(names: Iterable[Any]) -> set[Any]:
    return {without_wrappers(name) if isinstance(name, str) else name for name in names}


def _leaf_names(name: str, value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [each for key, item in value.items() for each in _leaf_names(f"{name}.{key}", item)]
    if is_nested_list(value):
        return [
            each
            for index, item in enumerate(value)
            for each in _leaf_names(f"{name}.{index}", item)
        ]
    return [name]


def _kind(value: Any) -> str:
    return "dict" if isinstance(value, Mapping) else "list"


def _shape(size: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(size)}"
