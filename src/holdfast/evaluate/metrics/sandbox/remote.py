"""Objects of the other process as this one sees them: functions, classes, iterators and instances.

Each passes what is done to it to its `Peer`, which asks the other side.
"""

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.evaluate.metrics.sandbox.rpc import Peer

COMPARING = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and", "xor",
    "or",
)  # fmt: skip
_PLAIN = (
    "call", "len", "getitem", "setitem", "delitem", "iter", "next", "reversed", "enter", "exit", "bool", "int", "float",
    "index", "abs", "neg", "pos", "invert", "round", "str", "repr", "hash", "format",
)  # fmt: skip
WITH_OPERAND = frozenset(
    f"__{name}__"
    for name in (
        *COMPARING,
        "contains",
        *(way + name for name in _ARITHMETIC for way in ("", "r", "i")),
    )
)
"""Those that see what they are compared or computed with."""
OPERATORS = WITH_OPERAND | {f"__{name}__" for name in _PLAIN}


class Remote:
    """An object of the other process."""

    _peer: "Peer"
    _number: int

    def __init__(self, peer: "Peer", number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)


class RemoteFunction(Remote):
    """A function of the other process."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it there."""
        return self._peer.ask("call", self._number, "", args, kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


class RemoteIterator(Remote):
    """An iterator of the other process, advanced when it is asked for more."""

    def __iter__(self) -> "RemoteIterator":
        return self

    def __next__(self) -> Any:
        return self._peer.ask("operate", self._number, "__next__")

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("get", self._number, name)  # send, throw and close of a generator


class RemoteObject(Remote):
    """An instance of a class of the other process; a subclass for each class carries the operators which that has."""

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self._number, name, (value,))

    def __delattr__(self, name: str) -> None:
        self._peer.ask("delete", self._number, name)


class RemoteClass(Remote):
    """A class of the other process."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make an instance, which stays there."""
        return self._peer.ask("call", self._number, "", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("get", self._number, name)

    def __instancecheck__(self, instance: object) -> bool:
        return (
            isinstance(instance, Remote)
            and self._peer.ask("isinstance", self._number, "", (instance,)) is True
        )

    def __subclasscheck__(self, other: type) -> bool:
        return (
            isinstance(other, Remote)
            and self._peer.ask("issubclass", self._number, "", (other,)) is True
        )

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        raise self._peer.untestable("a test derives a class from one of the program's")


def operator_of(name: str) -> Callable[..., Any]:
    """The method by which a class of `RemoteObject`s has an operator."""

    def operate(self: RemoteObject, *args: Any, **kwargs: Any) -> Any:
        return self._peer.operate(self, name, args, kwargs)

    return operate
