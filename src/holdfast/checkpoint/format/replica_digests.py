"""Pack and compare the digests of state that several ranks have, and name the entries that differ.

This module needs no torch.
"""

import itertools
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import xxhash

_NUMBERS: Final = 3
"""Numbers of 64 bits for each entry: the keys of its name and of its place, and its digest."""
_NAMED: Final = 20
"""The most entries that are named, because the message to the trainer has a limit."""
_NAME_LENGTH: Final = 200
_SHOWN: Final = 3


def name_key(name: str) -> int:
    """Return the number that stands for the flat name of an entry."""
    return xxhash.xxh3_64_intdigest(name.encode())


def pack(entries: Iterable[tuple[int, int, int]]) -> bytes:
    """Return the key of the name, the key of the place and the digest of each entry as bytes."""
    return _little(array("Q", itertools.chain.from_iterable(entries))).tobytes()


def _little(numbers: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


@dataclass(frozen=True, kw_only=True)
class Differing:
    """Entries whose replicas differ.

    Attributes:
        count: the number of the entries.
        entries: the names and ranks of the first entries, as text.
    """

    count: int = 0
    entries: tuple[tuple[str, str], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the differing entries as plain JSON values."""
        return asdict(self)

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Self:
        """Return the object that `as_json` was called on."""
        return cls(
            count=fields["count"], entries=tuple((name, ranks) for name, ranks in fields["entries"])
        )

    def __str__(self) -> str:
        shown = ", ".join(f"{name!r} ({ranks})" for name, ranks in self.entries[:_SHOWN])
        return shown if self.count <= _SHOWN else f"{shown} and {self.count - _SHOWN} more"


def compare(groups: Sequence[tuple[Sequence[int], bytes]], names: Iterable[str]) -> Differing:
    """Compare each entry with its replica on the lowest rank that has one.

    Args:
        groups: groups of ranks with equal entries, in order, each with its packed entries.
        names: the flat names of the entries that may differ.

    Returns:
        The entries that differ, with the ranks that differ from the lowest rank.
    """
    first: dict[tuple[int, int], int] = {}
    differing: dict[int, set[int]] = {}
    for ranks, packed in sorted(groups, key=lambda group: group[0][0]):
        numbers = _little(array("Q", packed))
        places = zip(numbers[::_NUMBERS], numbers[1::_NUMBERS], strict=True)
        for place, digest in zip(places, numbers[2::_NUMBERS], strict=True):
            if first.setdefault(place, digest) != digest:
                differing.setdefault(place[0], set()).update(ranks)
    if not differing:
        return Differing()
    named = {key: name for name in names if (key := name_key(name)) in differing}
    entries = sorted(
        (named.get(key, "?")[:_NAME_LENGTH], ranks_text(ranks)) for key, ranks in differing.items()
    )
    return Differing(count=len(differing), entries=tuple(entries[:_NAMED]))


def ranks_text(ranks: Iterable[int]) -> str:
    """Return `rank 1` or `ranks 1-3, 5`; of many ranges, only the first ones."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and found[-1][-1] == rank - 1:
            found[-1][1:] = [rank]
        else:
            found.append([rank])
    shown = ", ".join("-".join(map(str, each)) for each in found[:_SHOWN])
    more = ", …" if len(found) > _SHOWN else ""
    return f"rank{'s' if len(found) > 1 or len(found[0]) > 1 else ''} {shown}{more}"
