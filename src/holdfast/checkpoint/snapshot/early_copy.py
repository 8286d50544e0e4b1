"""Choose the tensors that the call of `save` copies before training continues.

The optimizer's step waits until a snapshot is copied; forward and backward do not wait. Tensors
that only an optimizer's step changes can therefore be copied while forward and backward run. All
other tensors are copied in the call, up to `BUDGET_BYTES` together. Above this budget:

- For buffers of modules, and for tensors that changed during an earlier save, the call waits for
  the whole copy.
- Tensors outside modules and optimizers, such as a dict of averaged weights, are copied later if
  the state is attested. Otherwise the call waits for the whole copy.
- Parameters that no optimizer changes are copied later.

Training could change a tensor that is copied later before its copy is complete. A comparison of
digests or of PyTorch's version counters detects such a change.
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
"""The limit on bytes copied in the call because a forward pass may write to the tensors."""
SMALL_BYTES: Final = 16 << 10
"""The size in bytes up to which a tensor is always copied, such as an optimizer's counter."""
SMALL_ALL_BYTES: Final = 1 << 20
SMALL_COUNT: Final = 512
"""The limits on the bytes and the number of all small tensors: copying them takes under 1 ms."""


class Changes(enum.Enum):
    """Classify a tensor by the code that may write to it between two steps of an optimizer."""

    NOTHING = enum.auto()
    FORWARD = enum.auto()
    UNKNOWN = enum.auto()
    LOOSE = enum.auto()
    """A module's parameter that no optimizer changes, such as a frozen parameter or an average."""


def changes_of(
    contents: Contents, optimizers: OptimizerTensors, learnt: Collection[str]
) -> list[Changes]:
    """Return for each tensor of a state which code may write to it between optimizer steps.

    `learnt` names tensors that were found changed during earlier saves.
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
    """Choose the tensors that the call of `save` copies before it returns.

    Args:
        tensors: the tensors of the state.
        changes: which code may write to each tensor.
        attest: whether digests detect changes of tensors that are not chosen.
        but_on: GPUs that copy their own tensors. Of these tensors, only those that must be copied
            in the call are chosen.
        packed: the indices of tensors that such a GPU copies in the call anyway.
        budget_bytes: the limit on the bytes of all chosen tensors, apart from small ones.

    Returns:
        The indices of the chosen tensors, and whether the call must also wait until all other
        tensors are copied.
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
    """Return the indices of the tensors that the call copies because they are small.

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
    """Choose tensors from the smallest up, either all or none of the same type and shape.

    If a state has twenty thousand tensors of one kind, copying only some of them has no benefit.
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
    """Copy tensors in the call of `save`, into memory that is kept for the next call.

    The memory can be used again in the next call, because by then all copies are in a snapshot
    buffer.
    """

    def __init__(self) -> None:
        """Create the object without memory; the first copies allocate it."""
        self._places: list[int] = []
        self._kinds: list[Any] = []
        self._copies: list[torch.Tensor] = []
        self._are_plain = False

    @torch.inference_mode(mode=False)  # tensors made in inference mode cannot be written to outside
    @torch.no_grad()
    def take(
        self, tensors: Sequence[torch.Tensor], places: Iterable[int]
    ) -> dict[int, torch.Tensor]:
        """Copy the tensors at the indices `places`.

        Returns:
            Each copy, by the `id` of its live tensor.
        """
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
        """Copy the tensors `live`, reusing memory of former copies of the same type and shape."""
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
