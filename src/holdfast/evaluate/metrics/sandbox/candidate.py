"""Runs a generated program and answers its tests' calls. Everything here may be overwritten by the program.

What crosses to the tests is checked there (`peer`, `tester`); nothing of this process is believed.
"""

import contextlib
import random
import signal
import socket
import sys
import types
from typing import Any

from holdfast.evaluate.metrics.sandbox.rpc import Gone, Peer

MODULE = "candidate"


class Program:
    """The program, as the tests first know it."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._module = types.ModuleType(MODULE)

    def run(self) -> None:
        """Run it. Raises whatever it raises."""
        sys.modules[MODULE] = self._module  # dataclasses and pickle look their classes up there
        code = compile(self._source, "<program>", "exec")
        exec(code, self._module.__dict__)  # this is what the jail is for

    def names(self, wanted: list[str]) -> dict[str, Any]:
        """What the program calls by those of the `wanted` names that it has."""
        return {name: vars(self._module)[name] for name in wanted if name in vars(self._module)}


def main(source: str, link: socket.socket) -> None:
    """Serve until the tests are done."""
    random.seed(source)  # the same verdict each time for a program that draws
    peer = Peer(link, guarded=False)
    peer.refer(Program(source))  # object 0
    with contextlib.suppress(Gone):
        for _ in peer.serve():
            pass
    while True:
        signal.pause()  # whoever ends before it is killed has ended before its tests did
