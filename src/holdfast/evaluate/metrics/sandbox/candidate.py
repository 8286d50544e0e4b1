"""Run a generated program and answer the calls of its tests.

The program may overwrite anything in this process. So the tests' process (`rpc`, `tester`) checks
all data from this process and trusts none of it.
"""

import contextlib
import random
import signal
import socket
import sys
import types
from typing import Any

from holdfast.evaluate.metrics.sandbox.rpc import Peer, PeerEnded

MODULE = "candidate"


class Program:
    """The program, which the tests' process refers to as object 0."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._module = types.ModuleType(MODULE)

    def run(self) -> None:
        """Run the program; the program's exceptions pass through."""
        sys.modules[MODULE] = self._module  # dataclasses and pickle look up classes there
        code = compile(self._source, "<program>", "exec")
        exec(code, self._module.__dict__)  # foreign code, for which this process is jailed

    def names(self, wanted: list[str]) -> dict[str, Any]:
        """Return those objects of the program whose names are in `wanted`, by name."""
        return {name: vars(self._module)[name] for name in wanted if name in vars(self._module)}


def main(source: str, link: socket.socket) -> None:
    """Answer the tests' calls until the tests are done."""
    random.seed(source)  # for the same verdict each time
    peer = Peer(link, guarded=False)
    peer.refer(Program(source))  # becomes object 0
    with contextlib.suppress(PeerEnded):
        for _ in peer.serve():
            pass
    while True:
        signal.pause()  # an earlier end of this process would count as the program's failure
