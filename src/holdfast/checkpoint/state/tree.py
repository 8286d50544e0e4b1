"""A nested state as flat leaves and a skeleton of its shape.

Leaves are named as DCP names them, the path joined by dots, so that stock `torch.distributed.checkpoint.load`
finds them. DCP keeps every dict key as text and forgets empty containers; the skeleton keeps both: it is the
nested dicts and lists themselves, with each leaf replaced by its flat name.
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
"""What of a tensor a snapshot of it depends on."""
PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter}
"""What is all here, and copied as it is."""
_KEYS = {str, int, bool, float, type(None)}
_WRAPPER = re.compile(r"\b(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def irregular(tensor: torch.Tensor) -> str | None:
    """What a tensor is whose bytes, in a row, and whose type and shape are not all of it; None for all others."""
    if isinstance(
        tensor, ShardedTensor
    ):  # it answers nothing of this; PyTorch reads into its parts
        return None
    if is_lazy(tensor):
        return "uninitialized"
    if isinstance(tensor, DTensor) and any(
        placement.is_partial() for placement in tensor.placements
    ):
        return "partial"  # still to be added up
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
    """A name without what torch.compile, DistributedDataParallel, FSDP and activation checkpointing put into it."""
    return _WRAPPER.sub("", name)


class LiveTensors(list[torch.Tensor]):
    """Tensors as they come; `are_plain`: all that they are is seen by PyTorch itself, see `PLAIN_TENSORS`.

    `values`: copies of all that is no tensor, as it comes.
    """

    are_plain = True

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []


def capture(state: Any, tensors: LiveTensors) -> Any:
    """A copy of `state` that nobody changes any more but for the bytes of its tensors, which are added to `tensors`.

    It is taken while the training waits, so it looks at what has thousands of tensors once, and lets C do it.
    """
    if type(state) is dict or isinstance(state, Mapping):  # an optimizer has one for each parameter
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
        with contextlib.suppress(
            Exception
        ):  # it holds what cannot be saved either, which is told by its name later
            value = copy.deepcopy(state)
    tensors.values.append(value)
    return value


@dataclass(frozen=True, kw_only=True)
class FlatState:
    """`leaves`: flat name to tensor or plain value. `skeleton`: the shape, see `Skeleton`.

    `order`: the flat names of leaves and empty dicts as they come. Shapes are the same where skeletons and orders are
    equal: to Python, dicts are equal whatever their order, and 1 is True.
    """

    leaves: dict[str, Any]
    skeleton: dict[Any, Any]
    order: list[str]


def flatten(state: Mapping[Any, Any], *, prefix: str = "") -> FlatState:
    """Flatten nested dicts and lists; `prefix` comes before every flat name.

    Raises:
        BadUse: a value or key could not be read back without trusting the file, or two leaves share a name.
    """
    flat = _Flattening()
    skeleton = {key: flat.visit(f"{prefix}{key}", value) for key, value in state.items()}
    return FlatState(leaves=flat.leaves, skeleton=skeleton, order=flat.order)


class _Flattening:
    """What was found so far.

    A function within `flatten` that calls itself would be a cycle: the tensors would live until Python looks for such
    garbage, which trainers have it do rarely.
    """

    def __init__(self) -> None:
        self.leaves: dict[str, Any] = {}
        self.order: list[str] = []

    def visit(self, name: str, value: Any) -> Skeleton:
        """Take what is under `name`; its skeleton."""
        if isinstance(value, Mapping):
            kinds = set(map(type, value))
            if not kinds <= _KEYS:
                raise _not_plain(
                    f"a key of {name!r}", next(key for key in value if type(key) not in _KEYS)
                )
            if not value:
                self.order.append(name)
            if set(map(type, value.values())) <= PLAIN_TENSORS:  # there may be thousands of them
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
    """Whether DCP stores a list item by item: it holds a tensor, a dict or such a list. Else: one leaf."""
    return isinstance(value, list) and any(
        isinstance(item, torch.Tensor | Mapping) or is_nested_list(item) for item in value
    )


def merge_skeletons(skeletons: Sequence[Any]) -> Any:
    """The shape that holds all of `skeletons`, as ranks may have different parts of one state.

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
            f"Ranks disagree about the shape of the state: {skeletons}. Put what differs under per_rank."
        )
    return first


def skeleton_from_paths(paths: Mapping[str, Sequence[str | int]]) -> dict[Any, Any]:
    """The skeleton of a checkpoint that DCP wrote alone, from the paths of its leaves.

    DCP has turned integer keys into text. A dict whose keys are all digits was one with integer keys (that of
    an optimizer's state) far more often than not, so it becomes one again.
    """
    root: dict[Any, Any] = {}
    for name, path in paths.items():
        node: Any = root
        # Lists are dicts of integers at first: their items come in any order.
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
    """What is let in here is what `torch.load(weights_only=True)` reads back as it was."""
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
        f"Cannot save {where}: a {kind} cannot be read back without running code from the file. Convert "
        f"{hint} to tensors or plain values (numbers, text, lists, tuples, dicts), or pass its object, with "
        "state_dict and load_state_dict, at the top level of the state."
    )
