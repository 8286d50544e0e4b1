"""Run the tests against a program in another process and write the verdict.

The tests behave as if they ran in one namespace with the program: Hugging Face's code_eval
concatenates both. A name that the program defines and the tests use is the program's, through
`rpc`. Builtins and modules of the standard library are Python's own, even if the program has the
same names, unless the function under test has a builtin's name.
"""

import builtins
import importlib
import json
import os
import random
import socket
import sys
import types
from typing import Any

from holdfast.evaluate.metrics.sandbox.codec import Malformed
from holdfast.evaluate.metrics.sandbox.rpc import (
    Peer,
    PeerEnded,
    RemoteClass,
    RemoteIterator,
    RemoteObject,
    Untestable,
)

MODULE = "tests"


def main(source: str, nonce: str, link: socket.socket, verdict_fd: int) -> None:
    """Run the tests and write the verdict as JSON to the descriptor `verdict_fd`.

    The verdict is an object with the keys "nonce", "passed" and "reason".
    """
    random.seed(source)
    peer = Peer(link, guarded=True)
    try:
        reason = _run(source, peer)
    except Untestable as error:
        reason = f"cannot be tested: {error}"
    except (PeerEnded, Malformed) as error:
        reason = f"failed: {error}"
    except BaseException as error:
        reason = _failed(error)
    if reason == "passed" and peer.spoilt:
        reason = peer.spoilt if peer.spoilt.startswith("cannot") else f"failed: {peer.spoilt}"
    verdict = json.dumps({"nonce": nonce, "passed": reason == "passed", "reason": reason[:2000]})
    os.write(verdict_fd, verdict.encode())


def _failed(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = ""
    name = type(error).__name__
    return f"failed: {name}: {text}" if text else f"failed: {name}"


def _run(source: str, peer: Peer) -> str:
    try:
        code = compile(source, "<tests>", "exec")
    except (SyntaxError, ValueError) as error:
        return f"failed: the tests do not compile ({error})"
    program = RemoteObject(peer, 0)
    program.run()
    names = sorted(_names(code))
    given = program.names(names)
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    if type(given) is not dict:
        raise PeerEnded("the program wrote on the channel itself")
    defined = {name: value for name, value in given.items() if type(name) is str and name in names}
    module.__dict__.update(_visible(peer, defined, _defined_by(code)))
    exec(code, module.__dict__)
    return "passed"


def _visible(peer: Peer, given: dict[str, Any], own: set[str]) -> dict[str, Any]:
    """Return those names of the program that the tests may use, with their values."""
    visible = {}
    shadowing = [name for name in given if hasattr(builtins, name)]
    modules = {
        name for name, value in given.items() if name in _MODULES and _poses_as_module(value)
    }
    under_test = given.keys() - modules - own - set(shadowing)
    if len(shadowing) > 1 and not under_test:
        raise peer.untestable(
            f"which of {', '.join(shadowing)} is under test, and which is Python's own"
        )
    for name, value in given.items():
        if name in shadowing and under_test:
            continue
        if isinstance(value, RemoteClass):
            peer.named.add(object.__getattribute__(value, "_number"))
        visible[name] = importlib.import_module(name) if name in modules else value
    return visible


def _poses_as_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType | RemoteClass | RemoteObject | RemoteIterator)


_MODULES = frozenset(
    name
    for name in sys.stdlib_module_names
    if not name.startswith("_") and name not in {"this", "antigravity"}
)


def _names(code: types.CodeType) -> set[str]:
    """Return all names that the code could look up."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _defined_by(code: types.CodeType) -> set[str]:
    """Return the names of functions and classes that the tests themselves define."""
    return {constant.co_name for constant in code.co_consts if isinstance(constant, types.CodeType)}
