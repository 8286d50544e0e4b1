"""Decide which batches the next attempt leaves out, by a pure function.

The range of batches that led to a broken loss is left out. If the loss breaks again at about the
same place, the range becomes twice as long, and also includes the batches that broke the loss this
time. The first time, the range grows at its end; from the second time on, it grows at both ends.
After `MAX_DOUBLINGS` doublings of a range, no more batches are left out at that place. A range is
never longer than `MAX_LENGTH`.
"""

from dataclasses import dataclass, replace
from typing import Any, Final, Self

from holdfast.core.left_out import MAX_RANGES, LeftOut, in_words
from holdfast.core.whole import whole_number

MAX_DOUBLINGS: Final = 3
MAX_LENGTH: Final = 4096
"""The largest number of batches in a range. If a longer range were needed, the training itself
would be broken, and not the data."""
MAX_IN_VAIN: Final = 8
"""The largest number of consecutive times that batches are left out without a gain."""


@dataclass(frozen=True, kw_only=True)
class Skip:
    """A range of batches, including both ends, that all later attempts leave out."""

    first: int
    last: int
    doublings: int = 0
    """The number of times that the range was made longer."""

    def __str__(self) -> str:
        return in_words(self.first, self.last)

    @classmethod
    def of_json(cls, data: Any) -> Self:
        """Convert JSON from the ledger to a skip.

        Raises:
            KeyError, TypeError, ValueError: it is malformed.
        """
        first, last, doublings = (whole_number(data[one]) for one in ("first", "last", "doublings"))
        if first is None or last is None or doublings is None or not 0 < first <= last:
            raise ValueError(f"not a range of batches: {data!r}")
        return cls(first=first, last=last, doublings=doublings)


@dataclass(frozen=True, kw_only=True)
class Skipping:
    """All batches that the attempts of a run leave out."""

    skips: tuple[Skip, ...] = ()
    """The ranges, in the order of the decisions, so that the latest range is the last one."""
    in_vain: int = 0
    """The number of consecutive times that batches were left out without a gain."""

    def next_skip(self, batches: tuple[int, int] | None) -> Skip | None:
        """Return the range to leave out from now on; None if no more batches must be left out.

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
        """Return True if batches at about the same place are already left out."""
        return batches is not None and bool(self._near(batches))

    def _near(self, batches: tuple[int, int]) -> list[Skip]:
        first, last = batches
        # The same loss may break some steps later next time, and its batches then begin after the
        # range that was left out.
        length = last - first + 1
        return [one for one in self.skips if first <= one.last + length and last >= one.first]

    def after(self, skip: Skip | None, *, gained: bool) -> Self:
        """Return a copy that is updated for a failure.

        Args:
            skip: a range that is left out because of the failure; None if there is none.
            gained: True if the run has gained since the previous failure.
        """
        in_vain = (0 if gained else self.in_vain) + (skip is not None)
        return replace(self.with_skip(skip), in_vain=in_vain)

    def with_skip(self, skip: Skip | None) -> Self:
        """Return a copy with an additional range, which replaces ranges that it contains."""
        if skip is None:
            return self
        others = tuple(one for one in self.skips if one.first < skip.first or one.last > skip.last)
        return replace(self, skips=(*others, skip))

    @property
    def left_out(self) -> LeftOut:
        """The union of all ranges."""
        return LeftOut.of((one.first, one.last) for one in self.skips)
