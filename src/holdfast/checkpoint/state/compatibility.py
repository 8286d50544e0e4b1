"""Does a state fit a checkpoint, and filling it once it does.

`fit` only looks, so that a state that does not fit is left as it was; `fill` puts in what was read.
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
    """Stands where the state has nothing yet."""


ABSENT = _Absent()


class Fit:
    """What to read for a state, and why it cannot take it.

    `wanted`: flat name to the tensor to read into, or None for a plain value. `problems`: one sentence each,
    naming the entry. `same`: pairs of entries, each by its own name and its flat name, that are one tensor in the
    state: what is wanted of the second is beside it, to be compared.
    `missing`, `unexpected`: names that only the state has, and only the checkpoint; of the latter nothing is wanted.
    """

    def __init__(
        self, saved: Mapping[str, Any], *, strict: bool = True, transposed: Collection[str] = ()
    ) -> None:
        """Look at nothing yet.

        Args:
            saved: flat name to DCP's description of it.
            strict: whether the checkpoint must have all that a state has. Else what it lacks is `missing`, what a
                state that is not empty lacks is `unexpected`, and a tensor of floating point may be of another type.
            transposed: flat names of the tensors that were stored the other way round.
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
        """Whether the checkpoint has a plain value of that flat name."""
        return isinstance(self._saved.get(flat), BytesStorageMetadata)

    def saved_shape(self, flat: str) -> tuple[int, ...] | None:
        """The shape of a tensor that was saved; None where there is none of that flat name."""
        saved = self._saved.get(flat)
        return tuple(saved.size) if isinstance(saved, TensorStorageMetadata) else None

    def saved_shape_of(self, name: str) -> tuple[int, ...] | None:
        """The same by a name without what wrappers add."""
        flat = self._unwrapped.get(name)
        return None if flat is None else self.saved_shape(flat)

    @functools.cached_property
    def _unwrapped(self) -> dict[str, str]:
        return {without_wrappers(flat): flat for flat in self._saved}

    def fit(self, name: str, target: Any, skeleton: Skeleton, *, adds: bool = False) -> Skeleton:
        """Compare one entry of the state, `target`, with the checkpoint's `skeleton` of it, recursively.

        A dict may lack keys of the checkpoint, they are added (where not strict: if it is empty, or `adds`); it may
        have none that the checkpoint lacks. A plain value takes whatever the checkpoint has.

        Returns:
            What of the skeleton is wanted.
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
        """Put what was read as another type, or the other way round, into the tensors of the state."""
        with torch.no_grad():
            for flat, target in self._converted:
                value = loaded[flat].t() if flat in self._transposed else loaded[flat]
                loaded[flat] = value.contiguous() if target is None else target.copy_(value)

    def adopt(self, name: str, target: Any, skeleton: Skeleton) -> None:
        """Note what to read for an object whose own code judges it: all of `skeleton`, whatever `target` is.

        Call it once all that `fit` compares is compared. A tensor is read into that of `target` where it has the
        same size and type and no other entry is read into it.
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
            self.problems.append(
                f"{name!r} is a {kind} tensor, which nothing is restored into here"
            )
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
        """Note that the checkpoint lacks `target`; an empty container needs nothing of it."""
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
            self.problems.append(
                f"{name!r} is a {kind} tensor, which nothing is restored into here"
            )
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
                f"{name!r} is sharded, and what is transposed is not restored into it"
            )
        elif (target.size(), target.dtype) != self._kind_of(target, flat, saved):
            self.problems.append(
                f"{name!r} is {_shape(target.size(), target.dtype)} in the state and "
                f"{_shape(*self._kind_of(None, flat, saved))} in the checkpoint"
            )
        elif target.dtype != saved.properties.dtype or flat in self._transposed:
            # A DTensor on the host would need a mesh of the host.
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
                f"{name!r} has one value in several places, as expand makes it: clone() it first"
            )
        elif own.numel() and (first := self._first_of(target, name, flat)):
            self.same.append((first, (name, flat)))
            self.wanted[flat] = (
                _room(saved) if own is target else torch.empty_like(target)
            )  # sharded alike
        else:
            self.wanted[flat] = target

    def _kind_of(
        self, target: torch.Tensor | None, flat: str, saved: TensorStorageMetadata
    ) -> tuple[torch.Size, torch.dtype]:
        """The size and the type that a saved tensor has once it is converted for `target`."""
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
        """The entry before it that is the same tensor, as tied weights are."""
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
                f"{name!r} has the names of a wrapped model in the {one} and not in the {other}: {advice}"
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
    """Put what was read into `target`, in place where it can be, and return what to keep in its stead.

    Tensors of `target` that were read into are in `loaded` themselves. `filled`: the `id`s of the containers of the
    state that something was put into already; where one comes again, it is another one from then on.
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
    """Return what was read in new containers, which are of the kinds that `target` has in their places.

    A checkpoint does not record the kinds of dicts: those come from `target`, as a Counter or the `_metadata` of a
    module's state. With `lost_empty` it does not record empty dicts either, as where DCP wrote it alone, and those of
    `target` stay.
    """
    into = functools.partial(rebuilt, loaded=loaded, lost_empty=lost_empty)
    if isinstance(skeleton, dict):
        present: Any = target if isinstance(target, Mapping) else {}
        entries: Any = copy.copy(present) if isinstance(present, dict) else {}
        entries.clear()
        for key, part in skeleton.items():  # not by update(), which counts in a Counter
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
    """Memory to read it into, wherever new tensors are made by default."""
    return torch.empty(saved.size, dtype=saved.properties.dtype, device=device)


def _is_expanded(own: torch.Tensor) -> bool:
    """Whether one value is in several places."""
    return any(
        stride == 0 and size > 1 for stride, size in zip(own.stride(), own.size(), strict=True)
    )


def _irregular(saved: TensorStorageMetadata) -> str | None:
    """What `irregular` says of a tensor, by what PyTorch's metadata says of it."""
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
