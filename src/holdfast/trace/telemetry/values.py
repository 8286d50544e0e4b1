"""Convert the text of a field to a value of a metric, or to the reason why it has no value."""

import math
from collections import Counter
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt

from holdfast.trace.telemetry.dictionary import FieldDictionary, Ids, TooManyDistinct, words_at
from holdfast.trace.telemetry.metrics import Metric, is_sentinel

Values = npt.NDArray[np.float64]

MISSING: Final = frozenset({b"", b"nan", b"null", b"none", b"n/a", b"na", b"-"})
"""Texts, in lower case, that mean that nothing was measured."""


class BadField(Exception):
    """A field is not a number; the argument has its bytes."""


def judged(metric: Metric, value: float) -> tuple[float, str]:
    """Return a valid value and '', or NaN and the reason why the value is dropped.

    A valid value is rounded to FLOAT, so that a file and the store converted from it have equal
    values.
    """
    if math.isnan(value):
        return math.nan, "missing"
    if is_sentinel(value):
        return math.nan, "sentinel"
    value = float(np.float32(value))
    return (value, "") if metric.low <= value <= metric.high else (math.nan, "out-of-range")


def rounded(values: Values, decimals: int) -> Values:
    """Round to a number of decimals as SQL's `round` does, with halves rounded away from zero."""
    scale = 10.0 ** abs(decimals)
    scaled = values * scale if decimals >= 0 else values / scale
    whole = np.trunc(scaled + np.copysign(0.5, scaled))
    return np.asarray(whole / scale if decimals >= 0 else whole * scale)


class FieldValues:
    """Convert fields to values of one metric.

    While fields repeat, each distinct field is parsed once and then looked up in a dictionary.

    Args:
        metric: the metric of the fields.
        factor: the factor from the file's unit to the metric's unit.
        limit: the maximum number of distinct fields in the dictionary; if there are more, each
            field is parsed.
    """

    def __init__(self, metric: Metric, factor: float, *, limit: int = 1 << 17) -> None:
        self.metric, self.factor = metric, factor
        self.dropped: Counter[str] = Counter()
        """Number of fields without a value, by reason, among fields that were not looked up."""
        self.dictionary: FieldDictionary | None = FieldDictionary(self._read, limit=limit)
        self.reasons: list[str] = [""]
        """For each id, the reason why its field has no value; '' if it has one."""
        self._by_id = np.full(64, math.nan)
        self._read_so_far = 1

    @property
    def by_id(self) -> Values:
        """Return the value of each id; NaN if it has no value."""
        return self._by_id[: self._read_so_far]

    def look_up(self, buffer: bytearray, starts: Ids, lengths: Ids) -> tuple[Values, Ids | None]:
        """Return a table of values, and the index in this table for each field.

        The value is NaN if a field has none. The indices are None if the table has one value per
        field, in the order of the fields.

        Raises:
            BadField: a field is not a number.
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
        # DCGM's special values are never ratios, so compare before the unit is changed.
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
