"""Explain a failed allocation of device memory by the sizes in the allocator's message."""

from typing import Final

import re2

_SIZE: Final = r"(\d+(?:\.\d+)?) ?([KMGT]i?B?|bytes)"
_ASKED: Final = re2.compile(rf"[Tt]ried to allocate {_SIZE}")
_TOTAL: Final = re2.compile(rf"(?:total capacity of {_SIZE}|; {_SIZE} total capacity)")
_LIVE: Final = re2.compile(rf"{_SIZE} (?:is allocated by PyTorch|already allocated)")
_IDLE: Final = re2.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_PROGRAM: Final = re2.compile(rf"Used {_SIZE} of {_SIZE} (?:hbm|vmem)")
_UNITS: Final = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_GIB: Final = 1 << 30


def memory_advice(text: str) -> str | None:
    """Explain the sizes in an out-of-memory message; return None if the message has no sizes.

    Args:
        text: the message of PyTorch's allocator (CUDA, HIP, XPU, NPU) or of XLA.
    """
    if (program := _sizes(_PROGRAM, text)) is not None:
        need, has = program
        return (
            f"The compiled program needs {_gib(need)} and the device has {_gib(has)}, so the program fits no device of"
            " this kind, however often it is started. Make the batch or the sequence smaller, shard or rematerialise"
            " more."
        )
    requested, total = _sizes(_ASKED, text), _sizes(_TOTAL, text)
    if requested is None or total is None:
        return None
    need, has = requested[0], total[0]
    live = (_sizes(_LIVE, text) or (0.0,))[0]
    idle = (_sizes(_IDLE, text) or (0.0,))[0]
    if need > has:
        return (
            f"One tensor of {_gib(need)} was asked for and the device has {_gib(has)}: it fits no device of this kind."
            " Make the micro-batch or the sequence shorter, shard that tensor, or compute it in chunks."
        )
    if live + need > has:
        return (
            f"The program holds {_gib(live)} and asked for {_gib(need)} more, and the device has {_gib(has)}: this"
            " configuration needs a larger device. Make the micro-batch or the sequence shorter, shard or recompute"
            " more. Only if the memory in use grew from step to step, look for tensors that are kept."
        )
    if idle >= need:
        return (
            f"The allocator holds {_gib(idle)} that no tensor uses, in pieces too small for {_gib(need)}. Set"
            " PYTORCH_ALLOC_CONF=expandable_segments:True, or make the sizes of the batches alike."
        )
    if live:
        return (
            f"The program holds {_gib(live)} and asked for {_gib(need)}, and the device has {_gib(has)}: something else"
            " holds the rest. End other processes on the device (`nvidia-smi`), and see that no two ranks share it."
        )
    return None


def _sizes(pattern: "re2._Regexp[str]", text: str) -> tuple[float, ...] | None:
    """Return the sizes in bytes that `pattern` captured; None if `pattern` does not match."""
    found = pattern.search(text)
    if found is None:
        return None
    groups = [group for group in found.groups() if group is not None]
    return tuple(
        float(number) * 1024.0 ** _UNITS[unit[0].lower()]
        for number, unit in zip(groups[::2], groups[1::2], strict=True)
    )


def _gib(size_bytes: float) -> str:
    return (
        f"{size_bytes / _GIB:.1f} GiB"
        if size_bytes >= _GIB / 10
        else f"{size_bytes / (1 << 20):.0f} MiB"
    )
