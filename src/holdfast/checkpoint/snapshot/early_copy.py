"""Choose the tensors that the call of `save` copies before training continues.

The module also keeps the memory of their copies. The optimizer's step waits for the copy of a
snapshot; forward and backward do not. Tensors that only an optimizer's step changes may therefore
be copied while forward and backward run. All other tensors are copied in the call, as far as the
copies are affordable:

| tensors | up to `BUDGET_BYTES` together | above this budget |
|---|---|---|
| buffers of modules; tensors found to change | copied in the call | the call waits for all |
| others, such as a raw dict of averages | copied in the call | digests find a change, else as above |
| parameters that no optimizer changes | copied in the call | digests or versions find a change |
"""

import enum
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

import torch

from holdfast.checkpoint.snapshot.ownership import OptimizerTensors, sharing_memory
from holdfast.checkpoint.state.capture import Contents
from holdfast.checkpoint.state.tensors import local
from holdfast.checkpoint.state.tree import KIND, PLAIN_TENSORS

BUDGET_BYTES: Final = 256 << 20
"""The most bytes of tensors that the call copies because forward may write to them."""
SMALL_BYTES: Final = 16 << 10
"""The most bytes of a tensor that the call copies in any case, such as an optimizer's counter."""
SMALL_ALL_BYTES: Final = 1 << 20
SMALL_COUNT: Final = 512
"""The most bytes and tensors of all small tensors together; their copy takes less than 1 ms."""


class Changes(enum.Enum):
    """The code that may write to a tensor between two steps of an optimizer."""

    NOTHING = enum.auto()
    FORWARD = enum.auto()
    UNKNOWN = enum.auto()
    LOOSE = enum.auto()
    """A parameter of a module that no optimizer changes: a frozen parameter, or an average."""


def changes_of(
    contents: Contents, optimizers: OptimizerTensors, learnt: Collection[str]
) -> list[Changes]:
    """Return which code may write to each tensor of a state.

    `learnt` names the tensors that were found changed.
    """
    tensors = contents.tensors
    modules = [each for each in contents.objects if isinstance(each, torch.nn.Module)]
    buffers = sharing_memory(tensors, (buffer for module in modules for buffer in module.buffers()))
    parameters = [parameter for module in modules for parameter in module.parameters()]
    loose = sharing_memory(tensors, parameters)
    frozen = sharing_memory(
        tensors, (parameter for parameter in parameters if not parameter.requires_grad)
    )
    optimizers.add(each for each in contents.objects if isinstance(each, torch.optim.Optimizer))
    owned = optimizers.owned(tensors)
    leaves = contents.leaves(None)
    found = {id(leaves[name]) for name in learnt if name in leaves}

    def one(place: int) -> Changes:
        if buffers[place] or id(tensors[place]) in found:
            return Changes.FORWARD
        # An optimizer may hold frozen parameters, too, but never changes them.
        if owned[place] and not frozen[place]:
            return Changes.NOTHING
        return Changes.LOOSE if loose[place] else Changes.UNKNOWN

    return [one(place) for place in range(len(tensors))]


def choose_early(
    tensors: Sequence[torch.Tensor],
    changes: Sequence[Changes],
    *,
    attest: bool,
    but_on: Collection[torch.device] = (),
    packed: Collection[int] = (),
    budget_bytes: int,
) -> tuple[list[int], bool]:
    """Choose the tensors that are copied in the call.

    Args:
        tensors: the tensors of the state.
        changes: which code may write to each tensor.
        attest: whether digests find changes that happen nevertheless.
        but_on: GPUs that take snapshots of their own. On these GPUs, only tensors that must be
            copied in the call are copied separately.
        packed: the places of tensors that such a GPU copies in the call in any case.
        budget_bytes: the limit for all copies together.

    Returns:
        The places of the chosen tensors, and whether the call has to wait until the other tensors
        are copied, too.
    """
    own = list(map(local, tensors))
    early = set(small_places(tensors, but_on=but_on))

    def of(kind: Changes, *, also_on_gpus: bool) -> list[int]:
        return [
            place
            for place, each in enumerate(changes)
            if each is kind
            and place not in packed
            and (also_on_gpus or own[place].device not in but_on)
        ]

    written, unknown = (
        of(Changes.FORWARD, also_on_gpus=True),
        of(Changes.UNKNOWN, also_on_gpus=not attest),
    )
    needed = written if attest else written + unknown
    left_bytes = budget_bytes - sum(own[place].nbytes for place in needed)
    if left_bytes < 0:
        return sorted(early), True
    early.update(needed)
    for places in (unknown if attest else [], of(Changes.LOOSE, also_on_gpus=False)):
        chosen = _smallest(own, places, left_bytes)
        left_bytes -= sum(own[place].nbytes for place in chosen)
        early.update(chosen)
    return sorted(early), False


def small_places(
    tensors: Sequence[torch.Tensor], *, but_on: Collection[torch.device] = ()
) -> list[int]:
    """Return the places of the tensors that are copied because they are small.

    Tensors on the GPUs in `but_on` are left out.
    """
    own = list(map(local, tensors))
    small = [
        place
        for place, each in enumerate(own)
        if each.device not in but_on and each.nbytes <= SMALL_BYTES
    ]
    return _smallest(own, small, SMALL_ALL_BYTES, most=SMALL_COUNT)


def _smallest(
    own: Sequence[torch.Tensor], places: Iterable[int], left_bytes: int, *, most: int | None = None
) -> list[int]:
    """Choose the smallest tensors first, and all or none of one type and shape.

    To copy only some of twenty thousand equal tensors would be as good as to copy none.
    """
    alike: dict[Any, list[int]] = {}
    for place in places:
        alike.setdefault((own[place].nbytes, *KIND(own[place])), []).append(place)
    chosen: list[int] = []
    for (size_bytes, *_), each in sorted(alike.items(), key=lambda item: item[0][0]):
        if size_bytes * len(each) <= left_bytes and (
            most is None or len(chosen) + len(each) <= most
        ):
            left_bytes -= size_bytes * len(each)
            chosen += each
    return chosen


class EarlyCopies:
    """Memory for the copies that the call makes.

    The next call uses the memory again; by then all copies are in a snapshot buffer.
    """

    def __init__(self) -> None:
        """Allocate no memory before the first copies."""
        self._places: list[int] = []
        self._kinds: list[Any] = []
        self._copies: list[torch.Tensor] = []
        self._are_plain = False

    @torch.inference_mode(mode=False)  # tensors made in inference mode cannot be written to outside
    @torch.no_grad()
    def take(
        self, tensors: Sequence[torch.Tensor], places: Iterable[int]
    ) -> dict[int, torch.Tensor]:
        """Copy the tensors at `places`; return each copy by the `id` of the live tensor."""
        places = [place for place in places if place < len(tensors)]
        live = [tensors[place] for place in places]
        kinds = list(map(KIND, live))
        are_plain = PLAIN_TENSORS.issuperset(map(type, live))
        if are_plain and self._are_plain and places == self._places and kinds == self._kinds:
            _copy(self._copies, live)  # there may be thousands of tensors
        else:
            self._copies = self._like(live, kinds, places)
            self._are_plain = are_plain and all(tensor.is_cpu for tensor in live)
        self._places, self._kinds = places, kinds
        return dict(zip(map(id, live), self._copies, strict=True))

    def _like(
        self, live: list[torch.Tensor], kinds: list[Any], places: list[int]
    ) -> list[torch.Tensor]:
        """Return copies, and reuse the memory of former copies of the same kind."""
        kept = {
            place: (kind, copy)
            for place, kind, copy in zip(self._places, self._kinds, self._copies, strict=True)
            if type(copy) is torch.Tensor and copy.is_cpu
        }
        copies, again = [], list[int]()
        for number, (tensor, kind, place) in enumerate(zip(live, kinds, places, strict=True)):
            former, copy = kept.get(place, (None, None))
            if copy is None or former != kind or type(tensor) not in PLAIN_TENSORS:
                copy = tensor.clone()
            else:
                again.append(number)
            copies.append(copy)
        _copy([copies[number] for number in again], [live[number] for number in again])
        return copies


def _copy(copies: list[torch.Tensor], live: list[torch.Tensor]) -> None:
    if copies:
        torch._foreach_copy_(copies, live)
