"""Yield the objects of a JSON document one at a time, without loading the document into memory."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.plain_text import opened_text

CHUNK_CHARACTERS: Final = 1 << 20
LONGEST_OBJECT_CHARACTERS: Final = 256 << 20
_DECODER: Final = json.JSONDecoder(strict=False)  # accepts control characters in strings
_SPACE: Final = " \t\r\n,"
_TORN: Final = re.compile(r"[\w.+-]*\s*$")


def json_objects(
    path: Path, lists: frozenset[str], *, next_step: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a document, each with the number of its first line.

    Args:
        path: a file with one JSON object, several objects in a row, or a list of objects. If an
            object has a list under one of the names in `lists`, the items of the list are yielded
            and the rest of the object is skipped. Other objects are yielded whole.
        lists: names of lists.
        next_step: the next step in the error message for a damaged file.

    Raises:
        BadTrace: the file is not JSON, is cut off, or an item is not an object; the message has the
            line.
    """
    with opened_text(path) as file:
        text = _Text(file, path, next_step)
        while text.peek():
            if text.peek() == "[":
                yield from _items(text, "the document")
                continue
            if text.peek() != "{":
                raise text.bad("expected a JSON object or list, which begins with `{` or `[`.")
            line = text.line
            text.skip()
            found, others = False, {}
            while text.peek() != "}":
                name = text.value()
                text.expect(":")
                if name in lists and text.peek() == "[":
                    found = True
                    yield from _items(text, repr(name))
                else:
                    others[str(name)] = text.value()
            text.skip()
            if not found:
                yield line, others


def _items(text: "_Text", name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of the list that comes next in the text, and move past the list."""
    text.skip()
    while text.peek() != "]":
        line = text.line
        item = text.value()
        if not isinstance(item, dict):
            raise text.bad(f"expected objects in the list {name}.")
        yield line, item
    text.skip()


class _Text:
    """Parse JSON from a file through a buffer of text that was read but not yet parsed."""

    def __init__(self, file: TextIO, path: Path, next_step: str) -> None:
        self._file, self._path, self._next_step = file, path, next_step
        self._buffer, self._at, self._ended = "", 0, False
        self._passed_lines, self._counted_to = 1, 0

    @property
    def line(self) -> int:
        """Return the line number of the next character, counted from 1."""
        self._passed_lines += self._buffer.count("\n", self._counted_to, self._at)
        self._counted_to = self._at
        return self._passed_lines

    def peek(self) -> str:
        """Return the next character other than a space or comma; empty at the end of the file."""
        while True:
            while self._at < len(self._buffer):
                if self._buffer[self._at] not in _SPACE:
                    return self._buffer[self._at]
                self._at += 1
            if not self._more(CHUNK_CHARACTERS):
                return ""

    def skip(self) -> None:
        """Move past one character."""
        self._at += 1

    def expect(self, character: str) -> None:
        """Move past `character`, or raise an error if another character comes next."""
        if self.peek() != character:
            raise self.bad(f"expected {character!r}.")
        self.skip()

    def value(self) -> Any:
        """Parse and return the next JSON value."""
        if not self.peek():
            raise self.bad("expected JSON: it is cut off here.")
        while True:
            try:
                value, end = _DECODER.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                # For a text that is cut off, the decoder reports the start of the text. For a
                # number or word that is cut off, it reports a place near the end of the buffer.
                torn = error.msg.startswith("Unterminated") or _TORN.match(self._buffer, error.pos)
                if torn and self._more(max(CHUNK_CHARACTERS, len(self._buffer) - self._at)):
                    continue
                self._at = min(error.pos, len(self._buffer))
                raise self.bad(
                    "expected JSON: " + ("it is cut off here." if torn else f"{error.msg}.")
                ) from None
            except RecursionError:
                raise self.bad("expected JSON that is not nested a thousand deep.") from None
            if end < len(self._buffer) or not self._more(CHUNK_CHARACTERS):
                self._at = end
                # A number at the end of the buffer may be incomplete, so the number is read again.
                return value

    def bad(self, problem: str) -> BadTrace:
        """Return an error for the current place in the file."""
        return BadTrace(self._path, problem, line=self.line, next_step=self._next_step)

    def _more(self, characters: int) -> bool:
        if self._ended:
            return False
        if len(self._buffer) - self._at > LONGEST_OBJECT_CHARACTERS:
            raise self.bad(f"expected objects of at most {LONGEST_OBJECT_CHARACTERS >> 20} MiB.")
        read = self._file.read(characters)
        self._ended = not read
        _ = self.line  # Count the lines that are about to be dropped.
        self._buffer = self._buffer[self._at :] + read
        self._at = self._counted_to = 0
        return bool(read)
