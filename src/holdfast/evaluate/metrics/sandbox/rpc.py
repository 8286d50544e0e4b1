"""Call objects of the other process, over the socket between a program and its tests.

A `Remote` represents a function, class, iterator or instance of the other process, and forwards all
operations to its `Peer`. A call is a request and its reply. A peer that waits for a reply answers
the other side's requests meanwhile, so that a function passed as argument can be called back. The
side of the tests is `guarded`, which means two things. It exposes only the intended parts of its
objects. And no operator of a program's object may decide a comparison in a test.
"""

import builtins
import importlib
import itertools
import operator
import socket
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.evaluate.metrics.sandbox.codec import Malformed, Packer, Unpacker, receive, send

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
"""Operators that receive a second operand."""
OPERATORS = WITH_OPERAND | {f"__{name}__" for name in _PLAIN}


class Remote:
    """Represent an object of the other process."""

    _peer: "Peer"
    _number: int

    def __init__(self, peer: "Peer", number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)


class RemoteFunction(Remote):
    """Represent a function of the other process."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function in the other process."""
        return self._peer.ask("call", self._number, "", args, kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


class RemoteIterator(Remote):
    """Represent an iterator of the other process, which advances when a value is needed."""

    def __iter__(self) -> "RemoteIterator":
        return self

    def __next__(self) -> Any:
        return self._peer.ask("operate", self._number, "__next__")

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("get", self._number, name)  # for send, throw and close of a generator


class RemoteObject(Remote):
    """Represent an instance of a class of the other process.

    For each such class there is a subclass, which has the operators of that class.
    """

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self._number, name, (value,))

    def __delattr__(self, name: str) -> None:
        self._peer.ask("delete", self._number, name)


class RemoteClass(Remote):
    """Represent a class of the other process."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Create an instance in the other process."""
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
    """Return a method that forwards an operator, for a subclass of `RemoteObject`."""

    def operate(self: RemoteObject, *args: Any, **kwargs: Any) -> Any:
        return self._peer.operate(self, name, args, kwargs)

    return operate


ENDED_EARLY = "the program ended before its tests did"
_LIBRARY = sys.stdlib_module_names
# Prefixes of internal attributes: of objects, generators, frames, tracebacks and code.
_INNER = ("_", "gi_", "cr_", "ag_", "f_", "tb_", "co_")
_ITERATORS = (
    types.GeneratorType,
    zip,
    map,
    filter,
    enumerate,
    reversed,
    itertools.chain,
    itertools.islice,
)


class Untestable(BaseException):
    """The test cannot run in two processes.

    Either the program would decide its own verdict, or a value is needed that cannot be sent.
    """


class PeerEnded(BaseException):
    """The other process ended, or violated the protocol."""


class Peer:
    """Send requests to the other side, and answer its requests.

    Attributes:
        named: the numbers of the classes that the tests name. Operators of these classes may decide
            a comparison of their instances, because the test then tests these operators.
        spoilt: the reason why the verdict can no longer be "passed"; empty while it can.
    """

    def __init__(self, link: socket.socket, *, guarded: bool) -> None:
        self._link = link
        self._guarded = guarded
        self._own: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Any] = {}
        self._classes: dict[int, type] = {}
        self.named: set[int] = set()
        self.spoilt = ""

    def untestable(self, why: str) -> BaseException:
        """Return the exception to raise for a test that cannot run in two processes.

        On the tests' side, the verdict can then no longer be "passed".
        """
        if not self._guarded:
            return TypeError(why)
        self.spoilt = self.spoilt or f"cannot be tested: {why}"
        return Untestable(why)

    # References

    def refer(self, value: Any) -> list[Any]:
        """Return the reference of an object; see `codec.References`."""
        if isinstance(value, Remote):
            return ["own", object.__getattribute__(value, "_number")]
        if self._guarded and (name := _library_name(value)):
            # The program uses its own library, so that no builtin of the tests acts on its behalf.
            return ["S", *name]
        number = self._number_of(value)
        if isinstance(value, type):
            if issubclass(value, BaseException):
                return ["x", number, "exception", *self._exception_class(value)]
            return ["x", number, "class", value.__name__]
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType):
            return ["x", number, "function", str(getattr(value, "__name__", "function"))]
        kind = type(value)
        if isinstance(value, _ITERATORS) or kind.__name__.endswith("_iterator"):
            return ["x", number, "iterator"]
        operators = [
            name
            for name in OPERATORS
            if getattr(kind, name, None) is not getattr(object, name, None)
        ]
        return ["x", number, "object", self._number_of(kind), kind.__name__, operators]

    def _number_of(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._own)
            self._own.append(value)
        return self._numbers[id(value)]

    def resolve(self, reference: list[Any]) -> Any:
        """Return the object of a reference; see `codec.References`."""
        if reference[0] == "S":
            if self._guarded:
                raise Malformed("the tests take no function by its name")
            return operator.attrgetter(reference[2])(importlib.import_module(reference[1]))
        number = reference[1]
        if reference[0] == "own":
            if not 0 <= number < len(self._own):
                raise Malformed("a reference to nothing")
            return self._own[number]
        if number not in self._remotes:
            self._remotes[number] = self._remote(number, *reference[2:])
        return self._remotes[number]

    def _remote(self, number: int, kind: str, *about: Any) -> Any:
        match kind, *about:
            case "function", str(name):
                function = RemoteFunction(self, number)
                function.__name__ = function.__qualname__ = name  # type: ignore[attr-defined]
                return function
            case "class", str(name):
                remote = RemoteClass(self, number)
                remote.__dict__.update({"__name__": name, "__qualname__": name})
                return remote
            case ["iterator"]:
                return RemoteIterator(self, number)
            case "exception", str(base), list(classes):
                return self._local_exception(base, classes)
            case "object", int(class_number), str(name), list(operators):
                if class_number not in self._classes:
                    members = {each: operator_of(each) for each in operators if each in OPERATORS}
                    if "__eq__" in members:
                        members.setdefault("__hash__", id)
                    self._classes[class_number] = type(
                        name, (RemoteObject,), {**members, "_class": class_number}
                    )
                return self._classes[class_number](self, number)
        raise Malformed(f"no object is described as {kind!r}")

    def operate(
        self, remote: RemoteObject, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Apply an operator of a remote object; raise an exception if this is not allowed."""
        if self._guarded and name in WITH_OPERAND:
            if name in {"__eq__", "__ne__"} and args[0] is remote:
                return name == "__eq__"
            theirs = type(remote).__name__
            if type(remote)._class not in self.named:  # type: ignore[attr-defined]
                raise self.untestable(
                    f"{name} of the program's own class {theirs} would decide the test"
                )
            if name[2:-2] in COMPARING and not isinstance(args[0], Remote):
                raise self.untestable(
                    f"{name} of the program's class {theirs} would be shown the expected value"
                )
        if name == "__hash__" and self._guarded:
            return id(remote)
        return self.ask("operate", remote._number, name, args, kwargs)

    # Exceptions

    def _exception_class(self, kind: type[BaseException]) -> list[Any]:
        own: list[Any] = []
        for each in kind.__mro__:
            if getattr(builtins, each.__name__, None) is each:
                return [each.__name__, own]
            if each.__module__.partition(".")[0] in _LIBRARY:
                own.append([each.__module__, each.__qualname__])
            elif issubclass(each, BaseException):
                own.append([self._number_of(each), each.__name__])
        return ["Exception", own]

    def _local_exception(self, base: str, classes: list[Any]) -> type[BaseException]:
        found = getattr(builtins, base, None)
        if not (isinstance(found, type) and issubclass(found, BaseException)):
            raise Malformed(f"{base} is no exception")
        kind: type[BaseException] = found
        for key, name in reversed(classes):
            if isinstance(key, str):
                known = (
                    getattr(sys.modules.get(key), str(name), None)
                    if key.partition(".")[0] in _LIBRARY
                    else None
                )
                kind = (
                    known if isinstance(known, type) and issubclass(known, BaseException) else kind
                )
                continue
            if key not in self._remotes:
                self._remotes[key] = type(str(name), (kind,), {})
            local = self._remotes[key]
            if not (isinstance(local, type) and issubclass(local, BaseException)):
                raise Malformed("an exception under the number of something else")
            kind = local
        return kind

    def _pack_exception(self, packer: Packer, error: BaseException) -> list[Any]:
        try:
            args = [packer.pack(each) for each in error.args]
            attributes = {str(key): packer.pack(value) for key, value in vars(error).items()}
        except Exception:
            args, attributes = (
                [f"an exception whose arguments cannot cross ({type(error).__name__})"],
                {},
            )
        return [*self._exception_class(type(error)), args, attributes]

    def _unpack_exception(
        self, unpacker: Unpacker, packed: list[Any], *, of_iterator: bool
    ) -> BaseException:
        base, classes, args, attributes = packed
        kind = self._local_exception(base, classes)
        values = [unpacker.unpack(each) for each in args]
        if (
            self._guarded
            and issubclass(kind, StopIteration | StopAsyncIteration)
            and not of_iterator
        ):
            # A StopIteration would silently end a loop of the tests.
            return RuntimeError("the program raised StopIteration")
        try:
            error = kind(*values)
        except Exception:
            error = kind.__new__(kind, *values)  # the constructor takes other arguments than `args`
        for name, value in attributes.items():
            if not name.startswith("_"):
                try:
                    setattr(error, name, unpacker.unpack(value))
                except Exception:
                    # A read-only attribute of a builtin exception was already set by its arguments.
                    continue
        return error

    # Requests

    def ask(
        self,
        verb: str,
        number: int,
        name: str = "",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation on an object of the other side; raise the operation's exceptions here.

        Raises:
            PeerEnded: the other side ended, or violated the protocol.
        """
        packer = Packer(self)
        packed = (
            [packer.pack(each) for each in args],
            {k: packer.pack(v) for k, v in (kwargs or {}).items()},
        )
        try:
            send(self._link, [verb, number, name, *packed, packer.heap()])
        except OSError as error:
            raise self._ended(ENDED_EARLY) from error
        while True:
            try:
                message = receive(self._link)
            except EOFError:
                raise self._ended(ENDED_EARLY) from None
            except Malformed as error:
                raise self._ended(f"the program wrote on the channel itself ({error})") from None
            try:
                is_reply, value, raised = self._handle(
                    message, packer.containers, of_iterator=name == "__next__"
                )
            except (Malformed, ValueError, TypeError, AttributeError, RecursionError) as error:
                raise self._ended(f"the program wrote on the channel itself ({error})") from None
            if raised is not None:
                raise raised
            if is_reply:
                return value

    def _handle(
        self, message: Any, sent: list[Any], *, of_iterator: bool
    ) -> tuple[bool, Any, BaseException | None]:
        """Handle a message of the other side, which is a reply or a request.

        Returns:
            (True, value, exception) for the reply to a request of this side. (False, None, None)
            after a request of the other side was answered.
        """
        match message:
            case ["gives", value, list(heap)]:
                return True, Unpacker(self, heap, sent).unpack(value), None
            case ["raises", list(packed_error), list(heap)]:
                unpacker = Unpacker(self, heap, sent)
                return (
                    True,
                    None,
                    self._unpack_exception(unpacker, packed_error, of_iterator=of_iterator),
                )
            case [str(), int(), str(), list(), dict(), list()]:
                self._answer(message)
                return False, None, None
        raise Malformed("neither a reply nor a request")

    def _ended(self, why: str) -> PeerEnded:
        self.spoilt = self.spoilt or why
        return PeerEnded(why)

    def serve(self) -> Iterator[None]:
        """Answer requests until the other side is gone; each iteration answers one request."""
        while True:
            try:
                message = receive(self._link)
            except (EOFError, OSError):
                return
            self._answer(message)
            yield

    def _answer(self, message: Any) -> None:
        verb, number, name, args, kwargs, heap = message
        unpacker = Unpacker(self, heap)
        received = list(unpacker.containers)
        values = (
            [unpacker.unpack(each) for each in args],
            {k: unpacker.unpack(v) for k, v in kwargs.items()},
        )
        packer = Packer(self, received)
        try:
            value = packer.pack(self._do(verb, self.resolve(["own", number]), name, *values))
            reply = ["gives", value, packer.heap(heap)]
            send(self._link, reply)
        except (PeerEnded, Untestable):
            raise
        except OSError as error:
            if isinstance(error, BrokenPipeError | ConnectionResetError):
                raise self._ended("the other side ended") from error
            self._answer_error(received, heap, error)
        except BaseException as error:
            self._answer_error(received, heap, error)

    def _answer_error(self, received: list[Any], heap: list[Any], error: BaseException) -> None:
        packer = Packer(self, received)
        packed = self._pack_exception(packer, error)
        try:
            contents = packer.heap(heap)
            send(self._link, ["raises", packed, contents])
        except (ValueError, TypeError, RecursionError):
            send(self._link, ["raises", ["RuntimeError", [], ["the error cannot cross"], {}], []])

    def _do(
        self, verb: str, subject: Any, name: str, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        if self._guarded:
            self._guard(verb, subject, name, args)
        match verb:
            case "call":
                return subject(*args, **kwargs)
            case "get":
                return getattr(subject, name)
            case "set":
                return setattr(subject, name, args[0])
            case "delete":
                return delattr(subject, name)
            case "operate" if name in OPERATORS:
                return _operate(subject, name, args, kwargs)
            case "isinstance":
                return isinstance(args[0], subject)
            case "issubclass":
                return issubclass(args[0], subject)
        raise TypeError(f"nothing can be done by {verb!r}")

    def _guard(self, verb: str, subject: Any, name: str, args: list[Any]) -> None:
        """Refuse the program access to internal parts of the tests' objects.

        Raises:
            AttributeError: the program may not read or change the attribute.
        """
        is_instance = not isinstance(
            subject, type | types.FunctionType | types.MethodType | types.ModuleType
        )
        if verb in {"get", "set", "delete"}:
            if name.startswith(_INNER) or not is_instance:
                raise AttributeError(f"a program has no {name!r} of a test's object")
            on_class = hasattr(type(subject), name)
            if verb == "delete" or (verb == "set" and (on_class or _is_behaviour(args[0]))):
                raise AttributeError(f"a program may not change {name!r} of a test's object")


def _is_behaviour(value: Any) -> bool:
    return isinstance(value, Remote) and callable(value)


def _library_name(value: Any) -> tuple[str, str] | None:
    """Return module and name of a function or class of the standard library; None for others."""
    if not isinstance(
        value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodDescriptorType
    ):
        return None
    module = getattr(value, "__module__", None) or getattr(
        getattr(value, "__objclass__", None), "__module__", None
    )
    name = getattr(value, "__qualname__", "")
    if not isinstance(module, str) or module.partition(".")[0] not in _LIBRARY:
        return None
    try:
        found = operator.attrgetter(name)(importlib.import_module(module))
    except (AttributeError, ImportError):
        return None
    return (module, name) if found is value else None


def _operate(subject: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    match name:
        case "__next__":
            return next(subject)
        case "__iter__":
            return iter(subject)
        case "__eq__":
            return subject == args[0]
        case "__ne__":
            return subject != args[0]
        case "__contains__":
            return operator.contains(subject, args[0])
    # Look up the operator on the type and never on the instance, as the interpreter does.
    return getattr(type(subject), name)(subject, *args, **kwargs)
