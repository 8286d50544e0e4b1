"""Number the batches that a training leaves out; the supervisor sends the numbers to its ranks.

The batches of a training are numbered from 1. The count continues from epoch to epoch, and includes
the batches that are left out. So a number refers to the same batch in every attempt, provided that
each epoch is read to its end. A number refers to the same batch on all ranks, provided that each
rank has the same number of batches in an epoch.
"""

import bisect
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from holdfast.core.errors import BadUse

ENV_LEAVE_OUT: Final = "HOLDFAST_LEAVE_OUT"
"""The environment variable with the batches to leave out, in the format of `LeftOut.as_text`."""
SKIPPED: Final = "batches_skipped"
"""The kind of the event that a rank sends after it has left out batches."""
MAX_RANGES: Final = 256
"""The most ranges that fit into the environment variable and a message."""
MAX_NUMBER: Final = 2**53
_RANGE: Final = re.compile(r"([0-9]{1,16})-([0-9]{1,16})")


@dataclass(frozen=True)
class LeftOut:
    """A sorted list of ranges of batch numbers, with a gap between any two ranges.

    A range includes its first and its last number.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> Self:
        """Create the list from ranges that may overlap and may come in any order."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted(ranges):
            if joined and first <= joined[-1][1] + 1:
                joined[-1] = joined[-1][0], max(joined[-1][1], last)
            else:
                joined.append((first, last))
        return cls(tuple(joined))

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Parse the text that `as_text` returns.

        Raises:
            BadUse: the text has another format.
        """
        matches = [_RANGE.fullmatch(part) for part in text.split(",")] if text else []
        ranges = [(int(one[1]), int(one[2])) for one in matches if one is not None]
        is_valid = len(ranges) == len(matches) <= MAX_RANGES
        if not is_valid or any(not 0 < first <= last <= MAX_NUMBER for first, last in ranges):
            raise BadUse(
                f"{ENV_LEAVE_OUT} is {text[:100]!r}: give at most {MAX_RANGES} ranges of batch numbers from 1 on, such "
                "as 120-124,300-307."
            )
        return cls.of(ranges)

    @classmethod
    def of_environment(cls) -> Self:
        """Read the batches to leave out from the environment; without a supervisor there are none.

        Raises:
            BadUse: see `of_text`.
        """
        return cls.of_text(os.environ.get(ENV_LEAVE_OUT, ""))

    def as_text(self) -> str:
        """Return the ranges as text, such as `120-124,300-307`."""
        return ",".join(f"{first}-{last}" for first, last in self.ranges)

    def __contains__(self, number: int) -> bool:
        at = bisect.bisect_right(self.ranges, (number, MAX_NUMBER + 1)) - 1
        return at >= 0 and number <= self.ranges[at][1]

    def between(self, after: int, before: int) -> list[tuple[int, int]]:
        """Return the parts of the ranges that lie above `after` and below `before`."""
        cut = ((max(first, after + 1), min(last, before - 1)) for first, last in self.ranges)
        return [(first, last) for first, last in cut if first <= last]


def in_words(first: object, last: object) -> str:
    """Format a range of batches for a sentence, such as `batches 3 to 5`."""
    return f"batch {first}" if first == last else f"batches {first} to {last}"
