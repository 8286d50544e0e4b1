"""Read which collectives a rank has begun, and when, from PyTorch's flight recorder.

PyTorch records the last collectives of each process (`TORCH_FR_BUFFER_SIZE`, by default 2,000). A
thread of the rank reads the record, which takes tens of milliseconds and does not involve the
training loop. Only the recorder of gloo is read. Reading the recorder of NCCL would query CUDA
events, which is not safe in every version of PyTorch while the job runs.
"""

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

REPORTED = 128
"""The largest number of collectives in a message. It is limited, since the supervisor compares the
collectives of all ranks.
"""
GROUPS = 64
STEPS = 16
"""The collectives of this number of last steps are reported."""
NAME_CHARACTERS = 80

Key = tuple[str, int]
"""Identifies a collective: the name of its process group, and its number in the group."""


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The last collectives that a rank has begun."""

    at_s: Mapping[Key, float]
    """The start time of each collective, in Unix seconds by the rank's own clock."""
    last: Mapping[str, int]
    """For each group, the number of its last collective."""
    waits: bool
    """True if an operation that the rank has begun is not complete, which means that the rank waits
    for other ranks.
    """
    steps_s: tuple[float, ...] = ()
    """The end times of the rank's last steps, in Unix seconds. All collectives began after the
    first of these times."""
    read_at_s: float
    """The time at which the record was read, by the same clock."""
    cost_s: float
    """The seconds that reading the record took."""

    def shifted(self, offset_s: float) -> "Begun":
        """Return a copy with all times shifted to a clock that is ahead by `offset_s` seconds."""
        return replace(
            self,
            at_s={key: at_s + offset_s for key, at_s in self.at_s.items()},
            steps_s=tuple(at_s + offset_s for at_s in self.steps_s),
            read_at_s=self.read_at_s + offset_s,
        )


def read_collectives(steps_s: Sequence[float] = ()) -> dict[str, Any] | None:
    """Return this process's last collectives as plain JSON.

    Args:
        steps_s: the end times of the process's last steps, in Unix seconds. Collectives before the
            first of these times are left out.

    Returns:
        The last collectives; None if PyTorch is not loaded, records no collectives, or has
        initialised CUDA.
    """
    recorder = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(recorder, "_dump_fr_trace_json", None)
    if dump is None or sys.modules["torch"].cuda.is_initialized():
        return None
    began_s = time.perf_counter()
    steps_s = [*steps_s][-STEPS - 1 :]
    since_ns = steps_s[0] * 1e9 if steps_s else 0.0
    waits, last, begun = _begun_since(since_ns, json.loads(dump(True, False)).get("entries", []))
    if not last or len(last) > GROUPS:
        return None
    names = list(last)
    return {
        "groups": [[name, last[name]] for name in names],
        "begun": [
            [names.index(group), number, at_ns] for group, number, at_ns in _thinned_out(begun)
        ],
        "waits": waits,
        "steps_s": steps_s,
        "read_at_ns": time.time_ns(),
        "cost_s": time.perf_counter() - began_s,
    }


def _begun_since(
    since_ns: float, entries: Iterable[Mapping[str, Any]]
) -> tuple[bool, dict[str, int], list[tuple[str, int, int]]]:
    """Summarize the collectives in the entries of PyTorch's Flight Recorder.

    Returns:
        Three values: whether an operation is not complete; the number of the last collective of
        each group; and the collectives that began after `since_ns`, each as its group, its
        number and its start.
    """
    waits = False
    last: dict[str, int] = {}
    begun: list[tuple[str, int, int]] = []
    for entry in entries:
        waits |= not entry["retired"]
        if entry["is_p2p"] or entry["profiling_name"].endswith("coalesced"):
            continue
        group, number = str(entry["process_group"][0])[:NAME_CHARACTERS], entry["collective_seq_id"]
        if number <= last.get(group, 0):  # a new group can have the name of a destroyed group
            begun = [one for one in begun if one[0] != group]
        last[group] = number
        if entry["time_created_ns"] > since_ns:
            begun.append((group, number, entry["time_created_ns"]))
    return waits, last, begun


def _thinned_out(begun: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Return at most `REPORTED` collectives: those whose number is a multiple of a power of 2.

    So all ranks choose the same collectives.
    """
    stride, highest = 1, max((number for _, number, _ in begun), default=0)
    while len(begun) > REPORTED and stride <= highest:
        stride *= 2
        begun = [one for one in begun if one[1] % stride == 0]
    return begun[-REPORTED:]


def collectives_of(message: Any) -> Begun | None:
    """Parse the collectives that a rank has sent; return None if the rank has no recorder.

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
    """Return the ranks that lack a collective in which others wait, and do not wait themselves."""
    groups = {group for one in begun.values() for group in one.last}
    highest = {group: max(one.last.get(group, 0) for one in begun.values()) for group in groups}
    return [
        rank
        for rank, one in begun.items()
        if not one.waits and any(number < highest[group] for group, number in one.last.items())
    ]


def roots(late: Mapping[int, set[str]], member: Mapping[int, Mapping[str, object]]) -> list[int]:
    """Return the ranks that are late in a group, and do not wait for a late rank in another group.

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
