"""Record a model's forward pass as a list of tensor operations, to repeat it without Python code.

The forward pass of a small model spends most of its time outside of the tensor operations, in
modules, hooks and configs. So the pass is recorded with inputs of several lengths. The recordings
may differ only in integers that grow linearly with the length. A replay calls the same operations
in the same order on the same parameters, and therefore returns the same bits as the model. This is
verified at other lengths. A model is not recorded if its operations depend on data, if it draws
random numbers, or if it changes its own state.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Forward = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
Inputs = Callable[[int], list[torch.Tensor]]

_UNREPEATABLE = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)
_DROPOUT_PLACE = 4  # the index among the arguments of scaled_dot_product_attention
_HARMLESS = {torch.ops.aten.detach_.default, torch.ops.aten.lift_fresh.default}


class NotRepeatable(Exception):
    """The forward pass cannot be repeated as a fixed list of operations."""


class _Slot(int):
    """The index of a tensor in the table of values."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the operations of a forward pass.

    For each operation, the recorder keeps the arguments, with a slot for each tensor, and the slots
    of the results.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[tuple[Any, list[Any], dict[str, Any], list[int]]] = []
        self.constants: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []  # keeps tensors alive, so that no id is reused
        self._slots: dict[int, _Slot] = {}
        for tensor in inputs:
            self._new(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_repeatable(func, args):
            raise NotRepeatable(str(func))
        given = [self._template(one) for one in args]
        named = {name: self._template(one) for name, one in (kwargs or {}).items()}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and id(result) in self._slots:
            return result  # a conversion without effect
        parts = list(result) if isinstance(result, list | tuple) else [result]
        if not all(isinstance(part, torch.Tensor) for part in parts):
            raise NotRepeatable(f"{func} tells Python something of the data")
        self.steps.append((func, given, named, [self._new(part) for part in parts]))
        return result

    def slot_of(self, tensor: torch.Tensor) -> int:
        """Return the slot of a tensor that an operation returned.

        Raises:
            NotRepeatable: no operation returned the tensor.
        """
        if id(tensor) not in self._slots:
            raise NotRepeatable("a result that no operation gave")
        return self._slots[id(tensor)]

    def size(self) -> int:
        """Return the number of slots in the table of values."""
        return len(self._kept)

    def _new(self, tensor: torch.Tensor) -> _Slot:
        self._kept.append(tensor)
        slot = self._slots[id(tensor)] = _Slot(len(self._kept) - 1)
        return slot

    def _template(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._slots:
                self.constants[self._new(value)] = value
            return self._slots[id(value)]
        if isinstance(value, list | tuple):
            return [self._template(one) for one in value]
        return value


class Replay:
    """Repeat a recorded forward pass; created by `replay_of`.

    Args:
        recorded: recordings of the same forward pass at several lengths.
        lengths: the length of each recording.
        results: the slots of the results.
    """

    def __init__(
        self, recorded: Sequence[_Recorder], lengths: Sequence[int], results: Sequence[int]
    ) -> None:
        self._lengths = lengths
        self._size = recorded[0].size()
        self._results = results
        self._extra: list[Any] = []  # constants and numbers, which follow the tensors in the table
        self._growing: list[tuple[int, int, int]] = []  # (slot, a, b) of each number a * length + b
        self._tensors = _same_constants(recorded)
        self._steps = [
            self._step(*steps) for steps in zip(*(one.steps for one in recorded), strict=True)
        ]

    @torch.inference_mode()
    def __call__(self, inputs: Sequence[torch.Tensor], length: int) -> list[torch.Tensor]:
        """Return the results of the forward pass for inputs of a length."""
        values: list[Any] = [None] * self._size + self._extra
        values[: len(inputs)] = inputs
        for slot, tensor in self._tensors.items():
            values[slot] = tensor
        for slot, factor, offset in self._growing:
            values[slot] = factor * length + offset
        for call, arguments, out in self._steps:
            if isinstance(out, int):
                values[out] = call(*arguments(values))
            else:
                for slot, part in zip(out, call(*arguments(values)), strict=True):
                    values[slot] = part
        return [values[slot] for slot in self._results]

    def _step(
        self, *alike: Any
    ) -> tuple[Any, Callable[[list[Any]], Sequence[Any]], int | list[int]]:
        func, _, named, out = alike[0]
        if any(other[0] is not func or other[2] != named or other[3] != out for other in alike[1:]):
            raise NotRepeatable(f"{func} is not always called alike")
        if any(isinstance(one, _Slot | list) for one in named.values()):
            raise NotRepeatable(f"{func} has a tensor by name")
        call = _with(func, named)
        getters = [self._getter(*values) for values in zip(*(one[1] for one in alike), strict=True)]
        is_flat = all(isinstance(one, int) for one in getters)
        if is_flat and len(getters) > 1:
            arguments: Callable[[list[Any]], Sequence[Any]] = itemgetter(*getters)
        else:
            arguments = _nested(getters)
        return call, arguments, out[0] if len(out) == 1 else out

    def _getter(self, *alike: Any) -> Any:
        """Return the index of an argument in the table of values; for a list, a list of indices.

        `alike` has the argument's value in each recording.
        """
        first = alike[0]
        if isinstance(first, list):
            if any(not isinstance(one, list) or len(one) != len(first) for one in alike):
                raise NotRepeatable("a list that changes its length")
            return [self._getter(*parts) for parts in zip(*alike, strict=True)]
        if isinstance(first, _Slot):
            if any(not isinstance(one, _Slot) or one != first for one in alike):
                raise NotRepeatable("a tensor from elsewhere")
            return int(first)
        place = self._size + len(self._extra)
        self._extra.append(first)
        if any(type(one) is not type(first) or one != first for one in alike):
            self._growing.append((place, *self._growth(alike)))
        return place

    def _growth(self, values: Sequence[Any]) -> tuple[int, int]:
        if not all(type(one) is int for one in values):
            raise NotRepeatable(f"{values} for lengths {self._lengths}")
        factor, rest = divmod(values[1] - values[0], self._lengths[1] - self._lengths[0])
        offset = values[0] - factor * self._lengths[0]
        if rest or any(
            value != factor * at + offset for value, at in zip(values, self._lengths, strict=True)
        ):
            raise NotRepeatable(f"{values} for lengths {self._lengths}")
        return factor, offset


def replay_of(
    forward: Forward, inputs: Inputs, *, record: Sequence[int], verify: Sequence[int]
) -> Replay | None:
    """Record a forward pass and return its replay; None if the pass cannot be repeated exactly.

    Args:
        forward: the forward pass, a function from tensors to tensors.
        inputs: returns inputs of a given length.
        record: the lengths at which the pass is recorded.
        verify: the lengths at which the replay must return the same bits.
    """
    try:
        with torch.inference_mode():
            replay = _record(forward, inputs, record)
            for length in verify:
                given = inputs(length)
                again = replay([tensor.clone() for tensor in given], length)
                if not all(map(torch.equal, forward(given), again)):
                    return None
    except (NotRepeatable, RuntimeError, ValueError):
        return None
    return replay


def _record(forward: Forward, inputs: Inputs, lengths: Sequence[int]) -> Replay:
    recorded, results = [], []
    for length in lengths:
        given = inputs(length)
        recorder = _Recorder(given)
        with recorder:
            given = forward(given)
        recorded.append(recorder)
        results.append([recorder.slot_of(tensor) for tensor in given])
    if (
        any(other != results[0] for other in results)
        or len({len(one.steps) for one in recorded}) > 1
    ):
        raise NotRepeatable("the operations differ from length to length")
    return Replay(recorded, lengths, results[0])


def _is_repeatable(func: Any, args: Sequence[Any]) -> bool:
    aten = torch.ops.aten
    if func is aten.dropout.default:
        return not args[2]  # outside of training it has no effect
    if func is aten.scaled_dot_product_attention.default:
        return len(args) <= _DROPOUT_PLACE or not args[_DROPOUT_PLACE]
    if func in _HARMLESS:
        return True
    return not func._schema.is_mutable and not any(tag in func.tags for tag in _UNREPEATABLE)


def _same_constants(recorded: Sequence[_Recorder]) -> dict[int, torch.Tensor]:
    """Return the tensors that the forward pass does not take as inputs.

    These are parameters, and small tensors with constant content.
    """
    first = recorded[0].constants
    for other in recorded[1:]:
        if other.constants.keys() != first.keys():
            raise NotRepeatable("constants come and go")
        for slot, tensor in other.constants.items():
            if tensor is not first[slot] and not torch.equal(tensor, first[slot]):
                raise NotRepeatable("a constant that changes")
    return first


def _with(func: Any, named: dict[str, Any]) -> Any:
    if not named:
        return func

    def call(*args: Any) -> Any:
        return func(*args, **named)

    return call


def _nested(getters: list[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    def arguments(values: list[Any]) -> Sequence[Any]:
        return [
            [values[part] for part in one] if isinstance(one, list) else values[one]
            for one in getters
        ]

    return arguments
