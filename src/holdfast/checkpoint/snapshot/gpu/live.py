"""The digests of the live tensors on one GPU, taken where they lie."""

import bisect
from collections.abc import Sequence

import torch

from holdfast.checkpoint.snapshot.gpu.memory import Packed
from holdfast.checkpoint.snapshot.gpu.xxh3_kernel import DeviceDigests
from holdfast.checkpoint.snapshot.plan import OnDevice, Plan


class LiveDigests:
    """Of all pieces of an image that are on one GPU, the first of which is `first_piece`.

    Large tensors are read where they live, small ones where they are packed.
    """

    def __init__(self, plan: Plan, part: OnDevice, packed: Packed | None) -> None:
        """Prepare what is the same in each save."""
        self._part = part
        self.first_piece = bisect.bisect_left(plan.pieces, part.first)
        end = bisect.bisect_left(plan.pieces, part.end)
        pieces = range(self.first_piece, end)
        digests = [
            int.from_bytes(plan.constant.get(place, b""), "little", signed=True) for place in pieces
        ]
        self._digests = torch.tensor(digests, dtype=torch.int64, device=part.device)
        taken = [place for place in pieces if place not in plan.constant]
        self._places = torch.tensor(
            [place - self.first_piece for place in taken], device=part.device
        )
        self._kernels = DeviceDigests(
            [plan.layout.pieces[place].length for place in taken], part.device
        )
        self._packed: list[int] = []
        self._direct: list[tuple[int, int]] = []
        for place in taken:
            number, offset = plan.pieces[place], plan.layout.pieces[place].offset
            if number < part.direct:
                assert packed is not None, "there are small ones"
                self._packed.append(packed.memory.data_ptr() + offset - packed.offset)
            else:
                self._direct.append(
                    (number - part.first, offset - plan.image.blobs[number].data_offset)
                )

    def take(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Digest what is there now, in the current stream.

        Args:
            sources: of the part's blobs; the small ones are packed already.

        Returns:
            int64, one a piece, as the CPU has them in memory.
        """
        begins = {number: sources[number].data_ptr() for number, _ in self._direct}
        addresses = [*self._packed, *(begins[number] + offset for number, offset in self._direct)]
        taken = torch.empty_like(self._places)
        self._kernels.enqueue(addresses, taken)
        return self._digests.index_copy(0, self._places, taken)
