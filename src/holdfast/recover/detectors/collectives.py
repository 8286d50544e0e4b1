"""Read which collectives a rank has begun, and when, from PyTorch's flight recorder.

PyTorch keeps the last collectives of each process (`TORCH_FR_BUFFER_SIZE`, 2,000 by default), with NCCL and with gloo.
A thread of the rank reads them; the training does no work for it. Where a rank has no recorder, there is nothing to
read.
"""

import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

REPORTED = 256
"""Limit for the collectives of a message, so that the message stays within the channel's bound."""
GROUPS = 64
STEPS = 64
NAME_CHARACTERS = 80
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""The functions that read the recorder in newer and in older versions of PyTorch."""

Key = tuple[str, int]
"""The name of a process group, and the number of a collective in the group."""


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The last collectives that a rank has begun."""

    at_s: Mapping[Key, float]
    """When each began, Unix seconds of the rank's own clock."""
    last: Mapping[str, int]
    """The number of the last collective in each group."""
    waits: bool
    """Whether an operation that the rank has begun is not complete: others must do something first."""
    steps_s: tuple[float, ...] = ()
    """When the rank completed its last steps."""
    read_at_s: float
    """When they were read, by the same clock."""
    cost_s: float
    """How long the reading has taken."""

    def shifted(self, offset_s: float) -> "Begun":
        """Return the same by a clock that is ahead by `offset_s`."""
        return replace(
            self,
            at_s={key: at_s + offset_s for key, at_s in self.at_s.items()},
            steps_s=tuple(at_s + offset_s for at_s in self.steps_s),
            read_at_s=self.read_at_s + offset_s,
        )


def read_collectives(steps_s: Iterable[float]) -> dict[str, Any] | None:
    """Return this process's last collectives as plain JSON, None where PyTorch is not loaded or records nothing.

    Args:
        steps_s: when the process completed its last steps, Unix seconds.
    """
    recorder = sys.modules.get("torch._C._distributed_c10d")
    dump = next((found for name in _DUMPS if (found := getattr(recorder, name, None))), None)
    if dump is None:
        return None
    began_s = time.perf_counter()
    entries = json.loads(dump(True, False)).get("entries", [])
    last: dict[str, int] = {}
    begun: list[tuple[str, int, int]] = []
    waits = False
    for entry in entries:
        waits |= not entry["retired"]
        if entry["is_p2p"]:
            continue
        group, number = str(entry["process_group"][0])[:NAME_CHARACTERS], entry["collective_seq_id"]
        last[group] = max(last.get(group, 0), number)
        begun.append((group, number, entry["time_created_ns"]))
    if not last or len(last) > GROUPS:
        return None
    names = list(last)
    return {
        "groups": [[name, last[name]] for name in names],
        "begun": [
            [names.index(group), number, at_ns] for group, number, at_ns in _thinned_out(begun)
        ],
        "waits": waits,
        "steps_s": [*steps_s][-STEPS:],
        "read_at_ns": time.time_ns(),
        "cost_s": time.perf_counter() - began_s,
    }


def _thinned_out(begun: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Return at most `REPORTED` collectives, the same ones on every rank: those with a multiple of a power of two."""
    stride = 1
    while len(kept := [one for one in begun if one[1] % stride == 0]) > REPORTED:
        stride *= 2
    return kept


def collectives_of(message: Any) -> Begun | None:
    """Return what a rank has sent; None for a rank without a recorder.

    Raises:
        KeyError, TypeError, ValueError, IndexError: the message is malformed.
    """
    if message is None:
        return None
    names = [(str(name), int(number)) for name, number in message["groups"]]
    at_s = {
        (names[int(group)][0], int(number)): int(at_ns) / 1e9
        for group, number, at_ns in message["begun"]
    }
    return Begun(
        at_s=at_s,
        last=dict(names),
        waits=message["waits"] is True,
        steps_s=tuple(float(at_s) for at_s in message["steps_s"]),
        read_at_s=int(message["read_at_ns"]) / 1e9,
        cost_s=float(message["cost_s"]),
    )


def without_the_others_collective(begun: Mapping[int, Begun]) -> list[int]:
    """Return the ranks that have not begun a collective in which others wait, and that wait for no other rank."""
    groups = {group for one in begun.values() for group in one.last}
    highest = {group: max(one.last.get(group, 0) for one in begun.values()) for group in groups}
    return [
        rank
        for rank, one in begun.items()
        if not one.waits and any(number < highest[group] for group, number in one.last.items())
    ]


def roots(late: Mapping[int, set[str]], member: Mapping[int, Mapping[str, object]]) -> list[int]:
    """Return the ranks that are late in a group, and wait in no other group for a rank that is late there.

    Args:
        late: for each rank, the groups in which it is late.
        member: for each rank, all of its groups.
    """
    found = [
        rank
        for rank, groups in late.items()
        if groups
        and not any(
            group in member[rank] and group not in groups
            for other, others in late.items()
            if other != rank
            for group in others
        )
    ]
    return found or [rank for rank, groups in late.items() if groups]
