"""Parse each distinct text field only once, however often it is repeated.

A telemetry file has hundreds of millions of fields, of which only a few thousand are distinct.
Fields are therefore looked up by their bytes, one block of fields at a time. The first 16 bytes of
a field are read as two words, and hashed to a slot of a table. The field is compared with the field
in the slot, so a hash collision does no harm. Only a new field is parsed, checked and given the
next id.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# Odd 64-bit constants from the finalizers of MurmurHash3 and SplitMix64. The high bits of a product
# depend on all bits of the word.
MULTIPLIERS: Final = tuple(
    np.uint64(m)
    for m in (
        0x9E3779B97F4A7C15,
        0xBF58476D1CE4E5B9,
        0x94D049BB133111EB,
        0xFF51AFD7ED558CCD,
        0xC4CEB9FE1A85EC53,
    )
)
SECOND_WORD: Final = np.uint64(0xD6E8FEB86659FD93)
KEEP: Final = np.array([(1 << (8 * length)) - 1 for length in range(9)], dtype=np.uint64)
NO_FIELD: Final = np.uint64(0xFFFFFFFFFFFFFFFF)
"""Marks an id whose field is not stored as words. No text contains eight bytes of all ones."""
SLOTS_PER_FIELD: Final = 8
"""Slots per field: enough to make second lookups rare, and few enough to fit into a CPU cache."""
PADDING_BYTES: Final = 16
"""Number of bytes that must follow the last field in a buffer, so that its words can be read."""


class TooManyDistinct(Exception):
    """The fields rarely repeat, so they must be parsed one by one."""


class FieldDictionary:
    """Assign ids to distinct fields: 1, 2, …, in the order of their first occurrence.

    Args:
        read: called once for each distinct field; `ids` passes on its exceptions.
        limit: the maximum number of distinct fields.
    """

    def __init__(self, read: Callable[[bytes], None], *, limit: int = 1 << 18) -> None:
        self.size = 1
        """The next id. Ids start at 1, and 0 means no field."""
        self._read, self._limit = read, limit
        self._first = np.full(64, NO_FIELD)
        self._second = np.zeros(64, dtype=np.uint64)
        self._has_second = False
        self._bits = 12
        self._levels: list[Ids] = [np.zeros(1 << self._bits, dtype=np.int64)]
        self._longest: dict[bytes, int] = {}

    def ids(self, buffer: bytearray, starts: Ids, lengths: Ids) -> Ids:
        """Return the id of each field in a buffer.

        Args:
            buffer: the text; at least `PADDING_BYTES` must follow the last field.
            starts: the start of each field, of shape (fields,).
            lengths: the length of each field in bytes, of shape (fields,).

        Raises:
            TooManyDistinct: there are more than `limit` distinct fields.
        """
        first = _words(buffer, starts, lengths)
        long = np.flatnonzero(lengths > 8)
        second = None
        if len(long) or self._has_second:
            self._has_second = True
            second = np.zeros(len(first), dtype=np.uint64)
            second[long] = _words(buffer, starts[long] + 8, lengths[long] - 8)
        longest = long[lengths[long] > 16]
        if len(longest):
            # Keep long fields out of the table, which holds 16 bytes of a field.
            first[longest] = 0
            second[longest] = 0  # type: ignore[index]
        found = self._look_up(first, second)
        for place in longest.tolist():
            field = bytes(buffer[starts[place] : starts[place] + lengths[place]])
            found[place] = self._longest.get(field) or self._add_longest(field)
        return found

    def _look_up(self, first: Words, second: Words | None) -> Ids:
        found = self._at_level(0, first, second)
        wrong = self._first[found] != first
        if second is not None:
            wrong |= self._second[found] != second
        if not wrong.any():
            return found
        left = np.flatnonzero(wrong)
        for level in range(1, len(self._levels)):
            part = self._at_level(level, first[left], None if second is None else second[left])
            right = self._first[part] == first[left]
            if second is not None:
                right &= self._second[part] == second[left]
            found[left[right]] = part[right]
            left = left[~right]
            if not len(left):
                return found
        if second is None:
            unseen = np.unique(first[left])
            self._add(np.stack([unseen, np.zeros_like(unseen)]))
        else:
            self._add(np.unique(np.stack([first[left], second[left]]), axis=1))
        found[left] = self._look_up(first[left], None if second is None else second[left])
        return found

    def _at_level(self, level: int, first: Words, second: Words | None) -> Ids:
        return self._levels[level].take(self._slots(level, first, second), mode="clip")

    def _slots(self, level: int, first: Words, second: Words | None) -> Ids:
        mixed = first.copy() if second is None else first ^ (second * SECOND_WORD)
        mixed *= MULTIPLIERS[level]
        mixed >>= np.uint64(64 - self._bits)
        return mixed.view(np.int64)

    def _add(self, words: Words) -> None:
        """Parse new fields, and assign ids and slots to them.

        `words` has the shape (2, fields). The table grows if it becomes too full.
        """
        for first, second in words.T.tolist():
            self._read(
                first.to_bytes(8, "little").rstrip(b"\0")
                + second.to_bytes(8, "little").rstrip(b"\0")
            )
        new = self._next_ids(words.shape[1])
        self._first[new], self._second[new] = words
        crowded = self.size * SLOTS_PER_FIELD > 1 << self._bits
        while crowded or not self._place(new):
            while self.size * SLOTS_PER_FIELD > 1 << self._bits:
                self._bits += 1
            self._levels = [np.zeros(1 << self._bits, dtype=np.int64)]
            new = np.flatnonzero(self._first[: self.size] != NO_FIELD)
            crowded = False

    def _place(self, new: Ids) -> bool:
        """Put each id into its first free slot; return False if an id has none in all levels."""
        for level in range(len(MULTIPLIERS)):
            if level == len(self._levels):
                self._levels.append(np.zeros(1 << self._bits, dtype=np.int64))
            table, slots = (
                self._levels[level],
                self._slots(level, self._first[new], self._second[new]),
            )
            free = table[slots] == 0
            table[slots[free]] = new[free]
            new = new[table[slots] != new]
            if not len(new):
                return True
        return False

    def _add_longest(self, field: bytes) -> int:
        self._read(field)
        self._longest[field] = int(self._next_ids(1)[0])
        return self._longest[field]

    def _next_ids(self, number: int) -> Ids:
        if self.size + number > self._limit:
            raise TooManyDistinct
        while self.size + number > len(self._first):
            self._first = np.concatenate([self._first, np.full_like(self._first, NO_FIELD)])
            self._second = np.concatenate([self._second, np.zeros_like(self._second)])
        self.size += number
        return np.arange(self.size - number, self.size)


def words_at(buffer: bytearray, starts: Ids, lengths: Ids) -> Words:
    """Return the first 16 bytes of each field as two words, of shape (fields, 2).

    Bytes after the end of a field are zero.
    """
    return np.stack(
        [_words(buffer, starts, lengths), _words(buffer, starts + 8, np.maximum(lengths - 8, 0))],
        axis=1,
    )


def _words(buffer: bytearray, starts: Ids, lengths: Ids) -> Words:
    """Return eight bytes from each start as a word; bytes after the end of a field are zero."""
    anywhere = np.ndarray((len(buffer) - 7,), dtype="<u8", buffer=buffer, strides=(1,))
    words: Words = anywhere[starts]
    # With `clip`, taking elements is twice as fast as with bounds checks. A field longer than eight
    # bytes keeps its whole first word.
    words &= KEEP.take(lengths, mode="clip")
    return words
