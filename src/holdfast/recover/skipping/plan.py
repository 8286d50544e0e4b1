"""Decide which batches the next attempt leaves out: a pure function.

The batches that led to a broken loss are left out. If the loss breaks again at about the same
place, the range becomes twice as long: it grows at its end the first time, and at both ends from
the second time on. The range then also contains the batches that broke the loss this time. After
`MAX_DOUBLINGS` doublings of a range, no more batches are left out at that place. A range is never
longer than `MAX_LENGTH`.
"""

from dataclasses import dataclass, replace
from typing import Any, Final, Self

from holdfast.core.left_out import MAX_RANGES, LeftOut, in_words
from holdfast.core.whole import whole_number

MAX_DOUBLINGS: Final = 3
MAX_LENGTH: Final = 4096
"""The most batches in a range: a longer range points to a training that does not work, not to bad
data."""
MAX_IN_VAIN: Final = 8
"""The most times in a row that batches are left out without a gain."""


@dataclass(frozen=True, kw_only=True)
class Skip:
    """Have all later attempts leave out a range of batches, both ends included."""

    first: int
    last: int
    doublings: int = 0
    """The number of times that the range was made longer."""

    def __str__(self) -> str:
        return in_words(self.first, self.last)

    @classmethod
    def of_json(cls, data: Any) -> Self:
        """Read a skip from the ledger.

        Raises:
            KeyError, TypeError, ValueError: it is malformed.
        """
        first, last, doublings = (whole_number(data[one]) for one in ("first", "last", "doublings"))
        if first is None or last is None or doublings is None or not 0 < first <= last:
            raise ValueError(f"no range of batches: {data!r}")
        return cls(first=first, last=last, doublings=doublings)


@dataclass(frozen=True, kw_only=True)
class Skipping:
    """The batches that the attempts of a run leave out."""

    skips: tuple[Skip, ...] = ()
    """The ranges, in the order of the decisions: the latest range is the last one."""
    in_vain: int = 0
    """The number of times in a row that batches were left out without a gain."""

    def next_skip(self, batches: tuple[int, int] | None) -> Skip | None:
        """Return the range to leave out from now on; None if no more batches are left out.

        Args:
            batches: the first and the last of the batches that led to a broken loss; None if
                unknown.
        """
        if batches is None or self.in_vain >= MAX_IN_VAIN:
            return None
        first, last = batches
        length = last - first + 1
        near = self._near(batches)
        if not near:
            fits = length <= MAX_LENGTH and len(self.skips) < MAX_RANGES
            return Skip(first=first, last=last) if fits else None
        known = near[-1]
        more = known.last - known.first + 1
        earlier = more // 2 if known.doublings else 0
        longer = Skip(
            first=min(max(1, known.first - earlier), first),
            last=max(known.last + more - earlier, last),
            doublings=known.doublings + 1,
        )
        fits = longer.last - longer.first < MAX_LENGTH and longer.doublings <= MAX_DOUBLINGS
        return longer if fits else None

    def is_near(self, batches: tuple[int, int] | None) -> bool:
        """Return True if batches at about the same place are left out already."""
        return batches is not None and bool(self._near(batches))

    def _near(self, batches: tuple[int, int]) -> list[Skip]:
        first, last = batches
        # A loss may break some steps later than before; its batches then begin after that range.
        length = last - first + 1
        return [one for one in self.skips if first <= one.last + length and last >= one.first]

    def after(self, skip: Skip | None, *, gained: bool) -> Self:
        """Return the batches that are left out after a failure.

        Args:
            skip: a range that is left out because of the failure.
            gained: True if the run has gained since the previous failure.
        """
        in_vain = (0 if gained else self.in_vain) + (skip is not None)
        return replace(self.with_skip(skip), in_vain=in_vain)

    def with_skip(self, skip: Skip | None) -> Self:
        """Return a copy with a further range, which replaces the ranges within it."""
        if skip is None:
            return self
        others = tuple(one for one in self.skips if one.first < skip.first or one.last > skip.last)
        return replace(self, skips=(*others, skip))

    @property
    def left_out(self) -> LeftOut:
        """The batches that the ranges leave out together."""
        return LeftOut.of((one.first, one.last) for one in self.skips)
