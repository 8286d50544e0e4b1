"""Split a nested state into flat leaves and a skeleton, which describes the nesting.

Leaves are the tensors and plain values. They are named as DCP names them, by their path joined with
dots, so that PyTorch's `torch.distributed.checkpoint.load` finds them. In these flat names, DCP
converts dict keys to text and drops empty containers. The skeleton preserves both, because it
consists of the nested dicts and lists themselves, with each leaf replaced by its flat name.
"""

import contextlib
import copy
import operator
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from holdfast.core.errors import BadUse

Skeleton = dict[Any, Any] | list[Any] | str
_SCALARS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.Size,
    torch.dtype,
    torch.device,
)
_UNCHANGING = {type(None), bool, int, float, complex, str, bytes}
_INT_BITS = 2000  # `weights_only` reads integers of up to 255 bytes
KIND = operator.attrgetter("dtype", "shape", "device")
"""Return the attributes of a tensor on which a snapshot plan depends."""
PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter}
"""The tensor types whose bytes are in this process and can be copied as they are."""
_KEYS = {str, int, bool, float, type(None)}
_WRAPPER = re.compile(r"\b(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def irregular(tensor: torch.Tensor) -> str | None:
    """Name the kind of a tensor that bytes, dtype and shape do not fully describe.

    Returns:
        The kind, such as `sparse` or `quantized`; None for an ordinary tensor.
    """
    # A ShardedTensor lacks the attributes that are read below. It counts as ordinary, because
    # PyTorch reads into its parts.
    if isinstance(tensor, ShardedTensor):
        return None
    if is_lazy(tensor):
        return "uninitialized"
    if isinstance(tensor, DTensor) and any(
        placement.is_partial() for placement in tensor.placements
    ):
        return "partial"  # the ranks' values must still be summed
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_nested:
        return "nested"
    if tensor.is_meta:
        return "meta"
    if tensor.layout is not torch.strided:
        return "sparse" if str(tensor.layout).startswith("torch.sparse") else str(tensor.layout)
    return None


def without_wrappers(name: str) -> str:
    """Remove the name parts that torch.compile, DDP, FSDP and activation checkpointing insert."""
    return _WRAPPER.sub("", name)


class LiveTensors(list[torch.Tensor]):
    """List the live tensors of a state, in order.

    Attributes:
        are_plain: whether the types of all tensors are in `PLAIN_TENSORS`, so that PyTorch counts
            every in-place change.
        values: copies of all plain values of the state, in order.
    """

    are_plain = True

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []


def capture(state: Any, tensors: LiveTensors) -> Any:
    """Copy the structure and the plain values of `state`; append its tensors to `tensors`.

    Returns:
        The copy, which has the same tensors. Later changes of `state` affect the copy only through
        the bytes of its tensors.
    """
    # Training waits for this function. So a dict of thousands of tensors is visited only once, with
    # C functions. An optimizer has one dict for each parameter, so the exact type is tested first.
    if type(state) is dict or isinstance(state, Mapping):
        if PLAIN_TENSORS.issuperset(map(type, state.values())):
            tensors.extend(state.values())
            return dict(state)
        return {key: capture(value, tensors) for key, value in state.items()}
    if isinstance(state, torch.Tensor):
        tensors.append(state)
        tensors.are_plain &= type(state) in PLAIN_TENSORS
        return state
    value = state
    if type(state) in (list, tuple) and set(map(type, state)) <= _UNCHANGING:
        value = state[:]
    elif is_nested_list(state):
        return [capture(item, tensors) for item in state]
    elif type(state) in (list, tuple, set):
        # A copy fails only for values that cannot be saved; `flatten` later reports them by name.
        with contextlib.suppress(Exception):
            value = copy.deepcopy(state)
    tensors.values.append(value)
    return value


@dataclass(frozen=True, kw_only=True)
class FlatState:
    """Hold a state that is split into leaves and a skeleton.

    Attributes:
        leaves: the tensors and plain values, by flat name.
        skeleton: the nested containers, with each leaf replaced by its flat name.
        order: the flat names of leaves and empty dicts, in order. To find out whether two states
            have the same shape, compare both `skeleton` and `order`. Comparing skeletons is not
            enough, because Python ignores the order of dicts, and takes 1 and True for equal.
    """

    leaves: dict[str, Any]
    skeleton: dict[Any, Any]
    order: list[str]


def flatten(state: Mapping[Any, Any], *, prefix: str = "") -> FlatState:
    """Flatten nested dicts and lists; `prefix` is put before every flat name.

    Raises:
        BadUse: a value or key could not be read back without running code from the file, or two
            leaves have the same name.
    """
    flat = _Flattening()
    skeleton = {key: flat.visit(f"{prefix}{key}", value) for key, value in state.items()}
    return FlatState(leaves=flat.leaves, skeleton=skeleton, order=flat.order)


class _Flattening:
    """Collect the leaves of a state, recursively."""

    # This is a class because a recursive function inside `flatten` would form a reference cycle.
    # The cycle would keep the tensors alive until the next garbage collection, and trainers collect
    # garbage rarely.

    def __init__(self) -> None:
        self.leaves: dict[str, Any] = {}
        self.order: list[str] = []

    def visit(self, name: str, value: Any) -> Skeleton:
        """Add all leaves in `value` under the flat name `name`; return the skeleton of `value`."""
        if isinstance(value, Mapping):
            kinds = set(map(type, value))
            if not kinds <= _KEYS:
                raise _not_plain(
                    f"a key of {name!r}", next(key for key in value if type(key) not in _KEYS)
                )
            if not value:
                self.order.append(name)
            # There may be thousands of tensors.
            if set(map(type, value.values())) <= PLAIN_TENSORS:
                names = [f"{name}.{key}" for key in value]
                if (
                    kinds <= {str} or len(set(names)) == len(names)
                ) and self.leaves.keys().isdisjoint(names):
                    self.leaves.update(zip(names, value.values(), strict=True))
                    self.order.extend(names)
                    return dict(zip(value, names, strict=True))
            return {key: self.visit(f"{name}.{key}", item) for key, item in value.items()}
        if is_nested_list(value):
            return [self.visit(f"{name}.{index}", item) for index, item in enumerate(value)]
        if not isinstance(value, torch.Tensor):
            _check_plain(name, value)
        if name in self.leaves:
            raise BadUse(f"Two entries of the state have the name {name!r}. Rename one of them.")
        self.leaves[name] = value
        self.order.append(name)
        return name


def is_nested_list(value: Any) -> bool:
    """Return True if DCP stores a list item by item.

    DCP does so if the list contains a tensor, a dict, or another list that it stores item by item.
    It stores any other list as one leaf.
    """
    return isinstance(value, list) and any(
        isinstance(item, torch.Tensor | Mapping) or is_nested_list(item) for item in value
    )


def merge_skeletons(skeletons: Sequence[Any]) -> Any:
    """Merge the skeletons of all ranks, which may have different parts of one state.

    Raises:
        BadUse: the same name is a container on one rank and a value on another.
    """
    first = skeletons[0]
    if all(isinstance(skeleton, dict) for skeleton in skeletons):
        keys = dict.fromkeys(key for skeleton in skeletons for key in skeleton)
        return {
            key: merge_skeletons([each[key] for each in skeletons if key in each]) for key in keys
        }
    if all(isinstance(skeleton, list) for skeleton in skeletons):
        length = max(len(skeleton) for skeleton in skeletons)
        return [
            merge_skeletons([each[index] for each in skeletons if index < len(each)])
            for index in range(length)
        ]
    if any(skeleton != first for skeleton in skeletons):
        raise BadUse(
            f"Ranks disagree about the shape of the state: {skeletons}. Put what differs under "
            "per_rank."
        )
    return first


def skeleton_from_paths(paths: Mapping[str, Sequence[str | int]]) -> dict[Any, Any]:
    """Rebuild the skeleton of a checkpoint that DCP wrote without Holdfast.

    The skeleton is rebuilt from the paths of the leaves. DCP converts integer keys to text. If all
    keys of a dict consist of digits, the dict is rebuilt with integer keys, because it is nearly
    always an optimizer's state.
    """
    root: dict[Any, Any] = {}
    for name, path in paths.items():
        node: Any = root
        # Build lists as dicts of integers first: their items come in any order.
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = name

    def settle(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        children = {key: settle(child) for key, child in node.items()}
        if all(isinstance(key, int) for key in children):
            return [children[index] for index in sorted(children)]
        if all(isinstance(key, str) and key.isdecimal() for key in children):
            return {int(key): child for key, child in children.items()}
        return children

    return {key: settle(child) for key, child in root.items()}


def _check_plain(name: str, value: Any) -> None:
    """Check that a value will be restored unchanged by `torch.load(weights_only=True)`."""
    if type(value) is int and value.bit_length() > _INT_BITS:
        raise BadUse(
            f"Cannot save {name!r}: an integer of {value.bit_length()} bits. Save it as text."
        )
    if type(value) in _SCALARS or isinstance(value, torch.Tensor):
        return
    if type(value) in (list, tuple, set):
        for item in value:
            _check_plain(name, item)
    elif type(value) in (dict, OrderedDict):
        for key, item in value.items():
            _check_plain(name, key)
            _check_plain(name, item)
    else:
        raise _not_plain(repr(name), value)


def _not_plain(where: str, value: Any) -> BadUse:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    hint = "NumPy values by .item() or torch.from_numpy()" if kind.startswith("numpy.") else "it"
    return BadUse(
        f"Cannot save {where}: a {kind} cannot be read back without running code from the file. "
        f"Convert {hint} to tensors or plain values (numbers, text, lists, tuples, dicts), or "
        "pass its object, with state_dict and load_state_dict, at the top level of the state."
    )
