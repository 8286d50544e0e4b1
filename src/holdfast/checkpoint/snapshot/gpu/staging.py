"""Which tensors of a GPU are copied to the host while training goes on, and which on the GPU first.

A copy to the host is free where it ends before the optimizer's step, which waits for the rest of it on the GPU. A copy
on the GPU costs its time at once, a twentieth of that, and memory. So, from the first tensor on, they are copied to the
host as far as the time reaches, and those behind are staged as far as the memory does.
"""

from collections.abc import Sequence
from typing import Final

_SAFE: Final = 0.8
"""Of the time that steps took lately, what is counted on."""


def in_time_bytes(window_s: float | None, bytes_per_s: float | None) -> float:
    """How many bytes reach the host before the optimizer's step.

    Args:
        window_s: from a save to that step, as the GPU saw it lately; None: that is not known.
        bytes_per_s: of copies to the host lately; None likewise.
    """
    return 0.0 if window_s is None or bytes_per_s is None else _SAFE * window_s * bytes_per_s


def first_staged(sizes_bytes: Sequence[int], *, in_time_bytes: float, room_bytes: float) -> int:
    """The index of the first tensor that is staged; their number where none is.

    Args:
        sizes_bytes: of the tensors, in the order in which they are copied.
        in_time_bytes: how much of them is copied before the optimizer's step.
        room_bytes: how much of them may be staged. Where that is too little, the optimizer's step waits.
    """
    first = 0
    for size_bytes in sizes_bytes:
        in_time_bytes -= size_bytes
        if in_time_bytes < 0:
            break
        first += 1
    left_bytes = sum(sizes_bytes[first:])
    while first < len(sizes_bytes) and left_bytes > room_bytes:
        left_bytes -= sizes_bytes[first]
        first += 1
    return first
