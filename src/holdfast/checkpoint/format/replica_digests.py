"""Find the state entries that should be equal on several ranks but differ.

Each rank packs digests of these entries, and rank 0's writing process compares them.

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
"""An entry has three 64-bit numbers: hashes of its name and its place, and its digest."""
_NAMED: Final = 20
"""The limit on named entries, because the message to the trainer has a size limit."""
_NAME_LENGTH: Final = 200
_SHOWN: Final = 3


def name_key(name: str) -> int:
    """Return a 64-bit hash of an entry's flat name."""
    return xxhash.xxh3_64_intdigest(name.encode())


def pack(entries: Iterable[tuple[int, int, int]]) -> bytes:
    """Pack entries as bytes; each is a hash of the name, a hash of the place, and a digest."""
    return _little(array("Q", itertools.chain.from_iterable(entries))).tobytes()


def _little(numbers: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


@dataclass(frozen=True, kw_only=True)
class Differing:
    """Describe the entries that differ between ranks.

    Attributes:
        count: the number of entries that differ.
        entries: for the first of them, the name of the entry and the ranks that differ, as text.
    """

    count: int = 0
    entries: tuple[tuple[str, str], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the object as plain JSON values."""
        return asdict(self)

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Self:
        """Rebuild the object from the values that `as_json` returned."""
        return cls(
            count=fields["count"], entries=tuple((name, ranks) for name, ranks in fields["entries"])
        )

    def __str__(self) -> str:
        shown = ", ".join(f"{name!r} ({ranks})" for name, ranks in self.entries[:_SHOWN])
        return shown if self.count <= _SHOWN else f"{shown} and {self.count - _SHOWN} more"


def compare(groups: Sequence[tuple[Sequence[int], bytes]], names: Iterable[str]) -> Differing:
    """Compare each entry with the same entry on the lowest rank that has it.

    Args:
        groups: groups of ranks whose packed entries are equal, in order; each with its packed
            entries.
        names: the flat names of the entries that may differ.

    Returns:
        The entries that differ, each with the ranks that differ from the lowest rank.
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
    """Return rank numbers as text, such as `rank 1` or `ranks 1-3, 5`.

    Of many ranges, only the first ones are included.
    """
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and found[-1][-1] == rank - 1:
            found[-1][1:] = [rank]
        else:
            found.append([rank])
    shown = ", ".join("-".join(map(str, each)) for each in found[:_SHOWN])
    more = ", …" if len(found) > _SHOWN else ""
    return f"rank{'s' if len(found) > 1 or len(found[0]) > 1 else ''} {shown}{more}"
