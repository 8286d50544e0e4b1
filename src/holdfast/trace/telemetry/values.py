"""From the text of a field to a metric's value, or to the reason why it has none."""

import math
from collections import Counter
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt

from holdfast.trace.telemetry.dictionary import FieldDictionary, Ids, TooManyDistinct, words_at
from holdfast.trace.telemetry.metrics import Metric, is_sentinel

Values = npt.NDArray[np.float64]

MISSING: Final = frozenset({b"", b"nan", b"null", b"none", b"n/a", b"na", b"-"})
"""Fields that say that nothing was measured, in lower case."""


class BadField(Exception):
    """A field that is no number; its bytes."""


def judged(metric: Metric, value: float) -> tuple[float, str]:
    """A value as it is kept, and why it is not; NaN and the reason, or the value and ''.

    Kept values are what FLOAT holds, so that a file and its converted store agree to the last digit.
    """
    if math.isnan(value):
        return math.nan, "missing"
    if is_sentinel(value):
        return math.nan, "sentinel"
    value = float(np.float32(value))
    return (value, "") if metric.low <= value <= metric.high else (math.nan, "out-of-range")


def rounded(values: Values, decimals: int) -> Values:
    """Values to so many decimals, halves away from zero, as SQL's `round` has it."""
    scale = 10.0 ** abs(decimals)
    scaled = values * scale if decimals >= 0 else values / scale
    whole = np.trunc(scaled + np.copysign(0.5, scaled))
    return np.asarray(whole / scale if decimals >= 0 else whole * scale)


class FieldValues:
    """Fields as values of one metric, through a dictionary for as long as they repeat.

    Args:
        metric: what the fields are values of.
        factor: from the file's unit to the metric's.
        limit: how many distinct fields to remember before each is parsed by itself.
    """

    def __init__(self, metric: Metric, factor: float, *, limit: int = 1 << 17) -> None:
        self.metric, self.factor = metric, factor
        self.dropped: Counter[str] = Counter()
        """How many fields had no value, by reason, of those that were parsed one by one."""
        self.dictionary: FieldDictionary | None = FieldDictionary(self._read, limit=limit)
        self.reasons: list[str] = [""]
        """Why the id's field has no value; '' where it has one."""
        self._by_id = np.full(64, math.nan)
        self._read_so_far = 1

    @property
    def by_id(self) -> Values:
        """The value of each id; NaN where it has none."""
        return self._by_id[: self._read_so_far]

    def look_up(self, buffer: bytearray, starts: Ids, lengths: Ids) -> tuple[Values, Ids | None]:
        """A table of values, NaN where there is none, and the place in it of each field; None: it is in their order.

        Raises:
            BadField: a field is no number.
        """
        if self.dictionary is not None:
            try:
                ids = self.dictionary.ids(buffer, starts, lengths)
            except TooManyDistinct:
                self.dictionary = None
            else:
                return self._by_id, ids
        return self._parse_each(buffer, starts, lengths), None

    def _read(self, field: bytes) -> None:
        value, reason = self._judge(field)
        if self._read_so_far == len(self._by_id):
            self._by_id = np.concatenate([self._by_id, np.full_like(self._by_id, math.nan)])
        self._by_id[self._read_so_far] = value
        self._read_so_far += 1
        self.reasons.append(reason)

    def _judge(self, field: bytes) -> tuple[float, str]:
        text = field.strip(b' "\r\t')
        if text.lower() in MISSING:
            return self.metric.blank, "" if self.metric.blank == self.metric.blank else "missing"
        try:
            number = float(text)
        except ValueError:
            _refuse(field)
        if b"_" in text:
            _refuse(field)
        # The words of DCGM are never ratios: they are known before the unit is changed.
        return (
            (math.nan, "sentinel")
            if is_sentinel(number)
            else judged(self.metric, number * self.factor)
        )

    def _parse_each(self, buffer: bytearray, starts: Ids, lengths: Ids) -> Values:
        values = np.full(len(starts), self.metric.blank)
        texts = words_at(buffer, starts, lengths).view("S16").ravel()
        plain = (lengths > 0) & (lengths <= 16)
        try:
            numbers = texts[plain].astype(np.float64)
            odd = np.flatnonzero((lengths > 16) | (plain & (lengths == 0)))
        except ValueError:
            plain[:] = False
            numbers, odd = np.empty(0), np.flatnonzero(lengths > 0)
        scaled = (numbers * self.factor).astype(np.float32).astype(np.float64)
        sentinel = is_sentinel(numbers)
        out = (scaled < self.metric.low) | (scaled > self.metric.high)
        scaled[sentinel | out] = math.nan
        values[plain] = scaled
        self.dropped["sentinel"] += int(sentinel.sum())
        self.dropped["out-of-range"] += int((out & ~sentinel).sum())
        for place in odd.tolist():
            values[place], reason = self._judge(
                bytes(buffer[starts[place] : starts[place] + lengths[place]])
            )
            if reason:
                self.dropped[reason] += 1
        return values


def _refuse(field: bytes) -> NoReturn:
    raise BadField(field)
