"""Decide from steps, rising counters and earlier errors if a job survived an error.

| sign of survival | when it counts |
|---|---|
| steps in a trainer's dialect (`Steps`) | the error's rank, or the job, reports larger steps |
| a number beside the same words that rises (`Counters`) | no steps in the log; four rises |
| another error of the same process (`Event.outlived`) | many lines between, few after it |
| the same error again (`Habits`) | the job made progress after it at least three times |
"""

import functools
import string
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import re2

from holdfast.diagnose.logs.progress import BARS

STEPS_SURVIVED: Final = 3
"""An error counts as survived after this number of further steps of other ranks. One step is not
enough: the ranks of a job step together, but their output may arrive a step or two late."""
_RISES_OF_A_COUNTER: Final = 8
"""A number counts as a counter if it has risen at least this often, and has hardly ever fallen."""
_RISES_SURVIVED: Final = 4
_FALLS: Final = 8
"""One fall is tolerated per this number of rises. A fall can come from a restart or from lines out
of order.
"""
_NUMBERS: Final = 6
"""Only this many numbers at the beginning of a line are followed, since a counter is among them."""
_PLACES: Final = 1024
_HABITUAL: Final = 3
_HABITS: Final = 4096

_SEPARATORS: Final = bytes.maketrans(b"=[](){},;|<>#@\"'\t", b" " * 17)
_NO_LETTERS: Final = bytes(set(range(128)) - set(string.ascii_letters.encode()))
_LARGEST_DIGITS: Final = 9
_WORDS: Final = 32
_LINE_SHAPES: Final = 1024
_ONE_DIGIT: Final = bytes.maketrans(b"0123456789", b"1111111111")
_LINE_BYTES: Final = 256
_NO_WORK = re2.compile(
    rb"(?i)retr[iy]|attempt|wait|elapsed|heart ?beat|alive|uptime|\bping|health|idle|poll|time-?d? ?out|restart"
    rb"|\bleft\b|remain|frame|^\s*#|thread|stack|error|fail|except|warn|signal|sigterm|kill|subprocess|exit|abort|\bclos|shut"
    rb"|terminat|watchdog|cancel|dump|leaked"
)
"""Matches words in lines whose numbers rise although the job does not progress: the job waits, is
monitored, or ends.
"""


@dataclass
class _Count:
    """The steps of one job that lines in one dialect report."""

    last: int
    largest: int
    steps: int = 0
    """The sum of the increases of the step; one increase counts for at most `STEPS_SURVIVED`."""
    rises: int = 0
    """The number of lines with a larger step than the previous line."""
    attempt: int = 0
    steps_before_attempt: int = 0


@dataclass
class OwnSteps:
    """The steps of one stream, by dialect: the last step and the number of rises."""

    last: dict[int, int] = field(default_factory=dict)
    rises: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Before:
    """The progress of a job at the time of an error."""

    own: Mapping[int, int]
    """By dialect, the number of rises of the step in the error's own stream."""
    job: Mapping[int, tuple[int, int, int, int]]
    """By dialect, the largest step of the job, its number of steps, its number of rises, and the
    number of its attempt.
    """
    rises_seen: int
    """The number of lines that were searched for counters before the error."""


class Steps:
    """Count the training steps that a log reports, separately for each dialect."""

    def __init__(self) -> None:
        self._counts: dict[int, _Count] = {}

    @property
    def total(self) -> int:
        """Return the number of steps in the dialect with the most steps."""
        return max((one.steps for one in self._counts.values()), default=0)

    @property
    def is_empty(self) -> bool:
        """Return True if no step was reported."""
        return not self._counts

    def note(self, dialect: int, step: int, own: OwnSteps, *, is_rank: bool) -> None:
        """Count a step that a stream of the log reports."""
        before = own.last.get(dialect)
        own.last[dialect] = step
        if before is not None and step > before:
            own.rises[dialect] = own.rises.get(dialect, 0) + 1
        count = self._counts.get(dialect)
        if count is None:
            self._counts[dialect] = _Count(last=step, largest=step)
            return
        count.largest = max(step, count.largest)
        # A smaller step means that the job was restarted within this log. Only the first rank that
        # goes back starts a new attempt; the other ranks follow.
        if before is not None and step < before <= count.last:
            count.last = step
            if is_rank:
                count.attempt += 1
                count.steps_before_attempt, count.largest = count.steps, step
        elif step > count.last:
            count.steps += min(step - count.last, STEPS_SURVIVED)
            count.rises += 1
            count.last = step

    def so_far(self) -> dict[int, tuple[int, int, int, int]]:
        """Return, by dialect, the largest step, the number of steps, of rises, and of the attempt."""
        return {
            dialect: (one.largest, one.steps, one.rises, one.attempt)
            for dialect, one in self._counts.items()
        }

    def went_on(self, before: Before) -> bool:
        """Return True if the job has made `STEPS_SURVIVED` steps since an error."""
        return any(
            self._went_on(dialect, count, before.job.get(dialect))
            for dialect, count in self._counts.items()
        )

    def _went_on(
        self, dialect: int, count: _Count, before: tuple[int, int, int, int] | None
    ) -> bool:
        if before is None:
            return count.steps >= STEPS_SURVIVED
        largest, steps, rises, attempt = before
        if count.attempt > attempt:  # the job was restarted since then
            return count.steps - count.steps_before_attempt >= STEPS_SURVIVED
        if count.rises - rises <= _drawn_on_leaving(dialect):
            return False
        return min(count.steps - steps, count.largest - largest) >= STEPS_SURVIVED


def own_went_on(own: OwnSteps, before: Before) -> bool:
    """Return True if the steps of the error's own stream have risen since the error.

    The first step that a stream prints does not count as a rise, since an old progress bar may be
    drawn again.
    """
    return any(
        rises - before.own.get(dialect, 0) > _drawn_on_leaving(dialect)
        for dialect, rises in own.rises.items()
    )


def _drawn_on_leaving(dialect: int) -> int:
    """Return how many rises printed after an error may report steps from before the error.

    A progress bar is not drawn at every step. When an error closes the bar, the bar is drawn a last
    time, and shows the steps since the previous drawing.
    """
    return 1 if dialect in BARS else 0


@dataclass
class _Numbers:
    """The values of a number that stands beside the same words in many lines."""

    largest: int
    rises: int = 0
    falls: int = 0
    latest: deque[int] = field(default_factory=lambda: deque(maxlen=_RISES_SURVIVED))
    """The line numbers at the last `_RISES_SURVIVED` rises."""

    def note(self, number: int, now: int) -> None:
        if number > self.largest:
            self.largest = number
            self.rises += 1
            self.latest.append(now)
        elif number < self.largest - max(2, self.largest // 50):
            self.falls += 1
            if self.falls * _FALLS > self.rises + _FALLS:
                self.rises = self.falls = 0
                self.latest.clear()
            self.largest = number

    @property
    def is_counter(self) -> bool:
        return self.rises >= _RISES_OF_A_COUNTER and self.falls * _FALLS <= self.rises


_Place: TypeAlias = tuple[bytes, bytes]
"""The words directly before and after a number."""


class Counters:
    """Find numbers with any name that rise from line to line."""

    def __init__(self) -> None:
        self.now = 0
        """The number of lines that were searched."""
        self._by_place: dict[_Place, _Numbers | None] = {}
        """By the words beside a number; None if the words show that the line does not report work.
        """
        self._counters: dict[_Place, _Numbers] = {}
        """The subset of `_by_place` that are counters."""
        self._known = (0, 0)
        self._known_at = 0

    def note(self, lines: Iterable[bytes]) -> None:
        """Search raw lines for counters."""
        for raw in lines:
            self.now += 1
            head = raw[:_LINE_BYTES]
            is_work: bool | None = None
            for place, begin, end in _numbers(head.translate(_ONE_DIGIT)):
                if place not in self._by_place:
                    is_work = _NO_WORK.search(raw) is None if is_work is None else is_work
                    if len(self._by_place) >= _PLACES:
                        oldest = next(iter(self._by_place))
                        del self._by_place[oldest]
                        self._counters.pop(oldest, None)
                    self._by_place[place] = _Numbers(int(head[begin:end])) if is_work else None
                elif (known := self._by_place[place]) is not None:
                    known.note(int(head[begin:end]), self.now)
                    if known.is_counter:
                        self._counters[place] = known
                    else:
                        self._counters.pop(place, None)

    @property
    def rises(self) -> int:
        """Return the number of rises of the counter with the most rises."""
        return self._newest()[1]

    @property
    def newest_rise(self) -> int:
        """Return the number of the newest line from which on some counter has risen four times."""
        return self._newest()[0]

    def went_on(self, before: Before) -> bool:
        """Return True if a counter rose four times after an error."""
        return self.newest_rise > before.rises_seen

    def _newest(self) -> tuple[int, int]:
        """Return two maxima over all counters: the line of the fourth-last rise, and the rises."""
        if self._known_at != self.now:
            counters = self._counters.values()
            self._known_at = self.now
            self._known = (
                max((one.latest[0] for one in counters), default=0),
                max((one.rises for one in counters), default=0),
            )
        return self._known


@functools.lru_cache(_LINE_SHAPES)
def _numbers(line: bytes) -> tuple[tuple[_Place, int, int], ...]:
    """Return the first whole numbers of a line, each with the words beside it, start and end.

    Parts of times, dates, addresses and fractions are left out, and so are numbers without a word
    beside them. The result does not depend on the values of the digits.
    """
    separated = line.translate(_SEPARATORS)
    words = separated.split()[:_WORDS]
    found: list[tuple[_Place, int, int]] = []
    behind = 0
    for at, word in enumerate(words):
        start = separated.index(word, behind)
        behind = start + len(word)
        if word.isalpha():
            continue
        name, value = _parted(word)
        if not value.isdigit() or len(value) > _LARGEST_DIGITS:
            continue
        after = words[at + 1] if at + 1 < len(words) else b""
        begin = start + len(name) + 1 if name else start
        if not name:
            name = words[at - 1] if at else b""
        beside = name.translate(None, _NO_LETTERS), after.translate(None, _NO_LETTERS)
        if any(beside):
            found.append((beside, begin, begin + len(value)))
        if len(found) == _NUMBERS:
            break
    return tuple(found)


def _parted(word: bytes) -> tuple[bytes, bytes]:
    """Split `name:5` and `name/5` into name and value; `5`, `5:` and `5/90` have an empty name."""
    for mark in (b":", b"/"):
        name, found, value = word.partition(mark)
        if found and value.isdigit() and name[-1:].isalpha():
            return name, value
    return b"", word.rstrip(b":").partition(b"/")[0]


class Habits:
    """Count how often a job survived the same error."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[int, int, int]] = {}
        self._ends = 0
        """The number of ends so far. Errors before an end were not survived."""

    def note_end(self) -> None:
        """Record the end of a process or of the job."""
        self._ends += 1

    def survived_before(self, rule_id: str, text: str, progress: int) -> int:
        """Record an error; return how often the job survived the same error before.

        Args:
            rule_id: the id of the rule that matched the error.
            text: the text of the error's line.
            progress: the number of steps of the job so far, or of rises of its counters.
        """
        key = (rule_id, text)
        times, ends, last = self._seen.pop(key, (0, self._ends, progress))
        if ends != self._ends:
            times = 0
        elif progress > last:
            times += 1
        if len(self._seen) >= _HABITS:
            del self._seen[next(iter(self._seen))]
        self._seen[key] = (times, self._ends, max(last, progress))
        return times


def is_habitual(survived_before: int) -> bool:
    """Return True if an error was survived so often that the last occurrence counts as survived."""
    return survived_before >= _HABITUAL
