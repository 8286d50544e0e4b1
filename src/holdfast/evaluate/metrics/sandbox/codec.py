"""Encode values as plain data, in frames, between two processes that do not trust each other.

Mutable containers are sent in a *heap* and referred to by number, so that sharing, cycles and
changes in place are preserved. A reply has the new contents of the containers in the request. Other
objects are sent as references (`rpc`). A decoded value has exactly a builtin type, or a value type
of the standard library that is created here. So a decoded value has no behaviour that comes from
the other process.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import json
import socket
import sys
import types
from collections.abc import Callable
from typing import Any, Protocol

from holdfast.core import channel
from holdfast.core.errors import ChannelError

MAX_FRAME_BYTES = 16 << 20
_ARRAY_KINDS = frozenset("biufcSU")  # dtype kinds of numpy arrays: numbers and strings, no objects
_SMALL_INT_BITS = 1024  # larger ones are written in base 16, which has no digit limit and is linear


class Malformed(Exception):
    """The received data was not written by this codec."""


class References(Protocol):
    """Convert between objects that cannot be sent as data, and references that are sent instead."""

    def refer(self, value: object) -> list[Any]:
        """Return the reference of an object, which may belong to this side or to the other side."""
        ...

    def resolve(self, reference: list[Any]) -> object:
        """Return the object that a reference received from the other side stands for."""
        ...


def send(link: socket.socket, message: Any) -> None:
    """Write one frame.

    Raises:
        ValueError: the message is too long, or nested too deeply.
        OSError: the other side is gone.
    """
    try:
        body = json.dumps(message, separators=(",", ":")).encode()
    except RecursionError as error:
        raise ValueError(
            "the value is nested too deeply to cross between program and tests"
        ) from error
    try:
        framed = channel.frame(body, MAX_FRAME_BYTES)
    except ChannelError as error:
        raise ValueError(
            f"the value takes {len(body)} bytes; at most {MAX_FRAME_BYTES} cross between program "
            "and tests"
        ) from error
    link.sendall(framed)


def receive(link: socket.socket) -> Any:
    """Read one frame.

    Raises:
        HungUp: the other side is gone.
        Malformed: the data is not a frame.
    """
    try:
        return json.loads(channel.receive_frame(link, MAX_FRAME_BYTES))
    except (ChannelError, ValueError, RecursionError) as error:
        raise Malformed(str(error)) from error


_ATOMS = (type(None), bool, str, float)
_BASES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
    (bytes, bytes.__bytes__),
    (complex, complex.__complex__),
)
_MUTABLE: dict[type, str] = {
    list: "l",
    dict: "d",
    set: "s",
    bytearray: "B",
    collections.deque: "q",
    collections.OrderedDict: "O",
    collections.Counter: "C",
    collections.defaultdict: "e",
}
_EMPTY: dict[str, type] = {tag: kind for kind, tag in _MUTABLE.items()}
_NAMED = {id(value): name for name, value in vars(builtins).items() if isinstance(value, type)} | {
    id(getattr(builtins, name)): name
    for name in ("len", "abs", "sum", "min", "max", "sorted", "any", "all", "ord", "chr", "round", "divmod", "pow",
                 "callable", "repr", "hash", "bin", "hex", "oct", "iter", "next")
}  # fmt: skip
_BY_NAME = {name: getattr(builtins, name) for name in _NAMED.values()}


class Packer:
    """Encode the values of one message.

    `known` are the containers that the other side already has, in the order of their numbers.
    """

    def __init__(self, references: References, known: list[Any] | None = None) -> None:
        self._references = references
        self.containers: list[Any] = list(known or [])
        self._numbers = {id(container): number for number, container in enumerate(self.containers)}

    def pack(self, value: Any) -> Any:
        """Encode a value as JSON.

        Raises:
            ValueError: the value is too large to be sent.
            RecursionError: the value is nested too deeply.
        """
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is int:
            return value if value.bit_length() <= _SMALL_INT_BITS else ["i", hex(value)]
        if kind in _MUTABLE:
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self.containers)
                self.containers.append(value)
            return ["@", self._numbers[id(value)]]
        if kind is tuple:
            return ["t", [self.pack(item) for item in value]]
        return self._pack_rare(kind, value)

    def _pack_rare(self, kind: type, value: Any) -> Any:  # noqa: PLR0912 - a line a kind
        if kind is frozenset:
            return ["z", [self.pack(item) for item in value]]
        if kind is bytes:
            return ["b", value.decode("latin-1")]
        if kind is complex:
            return ["c", value.real, value.imag]
        if kind in (range, slice):
            return [
                kind.__name__,
                self.pack(value.start),
                self.pack(value.stop),
                self.pack(value.step),
            ]
        if kind is decimal.Decimal:
            return ["D", str(value)]
        if kind is fractions.Fraction:
            return ["F", self.pack(value.numerator), self.pack(value.denominator)]
        if (
            kind in (datetime.datetime, datetime.date, datetime.time)
            and getattr(value, "tzinfo", None) is None
        ):
            return ["T", kind.__name__, value.isoformat()]
        if kind is datetime.timedelta:
            return ["delta", value.days, value.seconds, value.microseconds]
        if id(value) in _NAMED and _BY_NAME[_NAMED[id(value)]] is value:
            return ["n", _NAMED[id(value)]]
        if value is ... or value is NotImplemented:
            return ["n", "Ellipsis" if value is ... else "NotImplemented"]
        if isinstance(value, types.ModuleType) and value.__name__ in sys.stdlib_module_names:
            return ["m", value.__name__]
        fields = getattr(kind, "_fields", None)
        if issubclass(kind, tuple) and isinstance(fields, tuple):
            return [
                "N",
                kind.__name__,
                list(fields),
                [self.pack(item) for item in tuple.__iter__(value)],
            ]
        if (
            kind.__module__ == "numpy"
            and getattr(value, "shape", None) == ()
            and hasattr(value, "item")
        ):
            return self.pack(value.item())
        if (
            kind.__module__ == "numpy"
            and kind.__name__ == "ndarray"
            and value.dtype.kind in _ARRAY_KINDS
        ):
            return ["A", value.dtype.str, list(value.shape), value.tobytes().decode("latin-1")]
        for base, plain in _BASES:
            # A subclass of an immutable type crosses as its plain value, without its operators.
            if issubclass(kind, base):
                return self.pack(plain(value))
        return self._references.refer(value)

    def heap(self, sent: list[Any] | None = None) -> list[Any]:
        """Return the contents of all containers; None for contents that equal those in `sent`."""
        entries: list[Any] = []
        while len(entries) < len(self.containers):  # contents may add further containers
            entry = self._contents(self.containers[len(entries)])
            unchanged = (
                sent is not None and len(entries) < len(sent) and entry == sent[len(entries)]
            )
            entries.append(None if unchanged else entry)
        return entries

    def _contents(self, container: Any) -> list[Any]:
        tag = _MUTABLE[type(container)]
        if tag == "B":
            return [tag, container.decode("latin-1")]
        extra: list[Any] = []
        if tag == "q":
            extra = [container.maxlen]
        elif tag == "e":
            factory = container.default_factory
            extra = [None if factory is None else self.pack(factory)]
        if isinstance(container, dict):
            return [
                tag,
                [[self.pack(key), self.pack(item)] for key, item in dict.items(container)],
                *extra,
            ]
        return [tag, [self.pack(item) for item in container], *extra]


class Unpacker:
    """Decode the values of one message.

    `known` are this side's containers, which take the first numbers of the heap.
    """

    def __init__(self, references: References, heap: Any, known: list[Any] | None = None) -> None:
        """Decode the containers of the heap.

        Raises:
            Malformed: the heap was not written by this codec.
        """
        self._references = references
        self.containers: list[Any] = list(known or [])
        try:
            for number, entry in enumerate(heap):
                self._place(number, entry)
            for number, entry in enumerate(heap):
                if entry is not None:
                    self._fill(number, entry)
        except Malformed:
            raise
        except Exception as error:
            raise Malformed(f"{type(error).__name__}: {error}") from error

    def _place(self, number: int, entry: Any) -> None:
        if number >= len(self.containers):
            bound = {"maxlen": entry[2]} if entry[0] == "q" else {}
            self.containers.append(_EMPTY[entry[0]](**bound))
        elif entry is not None and entry[0] != _MUTABLE[type(self.containers[number])]:
            raise Malformed(f"a container of kind {entry[0]!r} came for another")

    def _fill(self, number: int, entry: list[Any]) -> None:
        tag, contents, *extra = entry
        container = self.containers[number]
        if tag == "B":
            container[:] = contents.encode("latin-1")
        elif tag == "l":
            container[:] = [self._read(item) for item in contents]
        elif tag in "sq":
            items = [self._read(item) for item in contents]
            container.clear()
            (container.update if tag == "s" else container.extend)(items)
        else:
            pairs = [(self._read(key), self._read(item)) for key, item in contents]
            dict.clear(container)
            for key, item in pairs:
                dict.__setitem__(container, key, item) if tag != "O" else container.__setitem__(
                    key, item
                )
            if tag == "e":
                container.default_factory = None if extra[0] is None else self._read(extra[0])

    def unpack(self, packed: Any) -> Any:
        """Decode a value.

        Raises:
            Malformed: the value was not written by this codec.
        """
        try:
            return self._read(packed)
        except Malformed:
            raise
        except Exception as error:
            raise Malformed(f"{type(error).__name__}: {error}") from error

    def _read(self, packed: Any) -> Any:  # noqa: PLR0912 - a case a kind
        if type(packed) is not list:
            if type(packed) is dict:
                raise Malformed("an object of JSON stands for no value")
            return packed
        match packed:
            case ["@", int(number)] if number >= 0:
                return self.containers[number]
            case ["t", list(items)]:
                return tuple([self._read(item) for item in items])
            case ["z", list(items)]:
                return frozenset([self._read(item) for item in items])
            case ["i", str(text)]:
                return int(text, 16)
            case ["b", str(text)]:
                return text.encode("latin-1")
            case ["c", real, imaginary]:
                return complex(real, imaginary)
            case ["range" | "slice" as kind, start, stop, step]:
                return (range if kind == "range" else slice)(
                    self._read(start), self._read(stop), self._read(step)
                )
            case ["D", str(text)]:
                return decimal.Decimal(text)
            case ["F", numerator, denominator]:
                return fractions.Fraction(self._read(numerator), self._read(denominator))
            case ["T", "datetime" | "date" | "time" as kind, str(text)]:
                return getattr(datetime, kind).fromisoformat(text)
            case ["delta", int(days), int(seconds), int(microseconds)]:
                return datetime.timedelta(days, seconds, microseconds)
            case ["A", str(dtype), list(shape), str(text)] if dtype[1:2] in _ARRAY_KINDS:
                array: Any = importlib.import_module("numpy").frombuffer(
                    text.encode("latin-1"), dtype=dtype
                )
                return array.reshape(shape).copy()
            case ["n", "Ellipsis"]:
                return ...
            case ["n", "NotImplemented"]:
                return NotImplemented
            case ["n", str(name)]:
                return _BY_NAME[name]
            case ["m", str(name)] if name in sys.stdlib_module_names:
                return importlib.import_module(name)
            case ["N", str(name), list(fields), list(items)] if len(fields) == len(items):
                return collections.namedtuple(name, fields)(*(self._read(item) for item in items))
            case ["x" | "own" | "S", *_]:
                return self._references.resolve(packed)
        raise Malformed(f"no value is written as {packed[:1]!r}")
