"""The process that writes one rank's checkpoints. It needs no torch, and goes on when the trainer dies.

Started by `Writer` with the number of a socket and the trainer's process id. It takes orders one after another, and
once the trainer is gone it ends those that it has, and then itself.
"""

import argparse
import contextlib
import os
import select
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any, Final

from holdfast.checkpoint.arena import Arena, ArenaError, State
from holdfast.checkpoint.commit import Order, RankFailed
from holdfast.checkpoint.disk import Pace
from holdfast.checkpoint.failures import explain
from holdfast.checkpoint.layout import Layout
from holdfast.checkpoint.messages import receive, send
from holdfast.checkpoint.persist import NotAttested, Part, persist

ALIVE_EVERY_S: Final = 0.5
_LOOK_EVERY_S: Final = 0.01
_FOLLOW_EVERY_S: Final = 0.001
"""How often it looks how far the copy is: 16 MiB take a few milliseconds."""
_PIECES: Final = 1000
"""More are not named."""
_NICENESS: Final = 5
"""Its threads wait for the disk most of the time; where the cores are short, the trainer goes first."""


class _Waited(Exception):
    """Others were waited for long enough."""


class Service:
    """Its arenas and layouts, and what it does with them."""

    def __init__(self, trainer: socket.socket) -> None:
        self._trainer = trainer
        self._trainer_pidfds: list[int] = []
        self._arenas: dict[int, Arena] = {}
        self._layouts: dict[int, Layout] = {}
        self._written_bytes = 0
        self._saying = threading.Lock()

    def serve(self, trainer_pid: int) -> None:
        """Take orders until the trainer is gone."""
        threading.Thread(target=self._say_alive, daemon=True).start()
        self._trainer_pidfds = _pidfd(trainer_pid)
        while True:
            # Not the socket's end alone: a process that the trainer forked may hold the other side open.
            ready, _, _ = select.select([self._trainer.fileno(), *self._trainer_pidfds], [], [])
            if self._trainer.fileno() not in ready:
                return
            try:
                received = receive(self._trainer)
            except OSError:
                return
            if received is None:
                return
            self._take(*received)

    def _take(self, message: dict[str, Any], fd: int | None) -> None:
        if fd is not None and "arena" in message:
            self._arenas[message["arena"]] = Arena(fd)
        elif fd is not None:
            with os.fdopen(fd, "rb") as file:
                file.seek(0)
                self._layouts[message["layout"]] = Layout.unpack(file.read())
        elif "forget" in message:
            for number in message["forget"]["arenas"]:
                self._arenas.pop(number).close()
            for number in message["forget"]["layouts"]:
                del self._layouts[number]
        else:
            self._save(message)

    def _save(self, message: dict[str, Any]) -> None:
        arena, generation = self._arenas[message["arena"]], message["generation"]
        layout, order = self._layouts[message["layout"]], Order.of_json(message["save"])
        ended: dict[str, Any] = {"arena": message["arena"], "generation": generation}
        began_s = time.monotonic()
        if (arena.generation, arena.state) == (generation, State.COMMITTED):  # by a process that died before it said so
            self._say({"ended": {**ended, "seconds": 0.0}})
            return
        until_s = began_s + message["timeout_s"]

        def wait() -> None:
            if time.monotonic() > until_s:
                raise TimeoutError(f"the other ranks were not through after {message['timeout_s']:g} s")
            time.sleep(_LOOK_EVERY_S)

        def await_copy(count: int | None) -> None:
            while (now := arena.progress(generation)).state is State.COPYING and (count is None or now.copied < count):
                if self._is_trainer_gone():
                    raise RankFailed("its trainer ended while the snapshot was copied")
                if time.monotonic() > until_s:
                    raise TimeoutError(f"the snapshot was not copied after {message['timeout_s']:g} s")
                time.sleep(_FOLLOW_EVERY_S)
            if now.state is State.FREE:
                raise RankFailed("its snapshot was given up")
            if now.state is State.SEALED:
                arena.move(State.WRITING, generation)

        live = bytes(arena.notes[: message["attested_bytes"]]) if message["attested_bytes"] else None
        try:
            await_copy(0)
            persist(
                Part(
                    order=order,
                    layout=layout,
                    image=arena.image,
                    live=live,
                    await_copy=await_copy,
                    wait=wait,
                    pace=Pace(message["max_write_bytes_s"]),
                    progress=self._wrote,
                )
            )
        except Exception as error:
            ended |= {"failed": explain(order, layout.size_bytes, error), "errno": getattr(error, "errno", None)}
            if isinstance(error, NotAttested):
                ended["pieces"] = error.pieces[:_PIECES]
            with contextlib.suppress(ArenaError):  # the trainer has given it up
                arena.move(State.FREE, generation)
        else:
            arena.move(State.COMMITTED, generation)
        self._say({"ended": {**ended, "seconds": time.monotonic() - began_s}})

    def _is_trainer_gone(self) -> bool:
        return bool(self._trainer_pidfds and select.select(self._trainer_pidfds, [], [], 0)[0])

    def _wrote(self, count: int) -> None:
        self._written_bytes += count

    def _say_alive(self) -> None:
        while True:
            self._say({"alive": self._written_bytes}, may_drop=True)
            time.sleep(ALIVE_EVERY_S)

    def _say(self, message: dict[str, Any], *, may_drop: bool = False) -> None:
        with self._saying:
            try:
                send(self._trainer, message, may_drop=may_drop)
            except OSError:  # the trainer is gone; what it ordered is done all the same
                _let_go_of_stderr()


def _let_go_of_stderr() -> None:
    """Whoever reads what the trainer says there waits until nobody can write to it any more."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.close(nothing)


def _pidfd(pid: int) -> list[int]:
    try:
        return [os.pidfd_open(pid)]
    except OSError:  # gone already, or a kernel before 5.3
        return []


def main() -> None:
    """Serve the trainer behind the socket that the arguments name."""
    parser = argparse.ArgumentParser(prog=Path(__file__).stem)
    parser.add_argument("socket", type=int)
    parser.add_argument("trainer_pid", type=int)
    arguments = parser.parse_args()
    # A terminal's interrupt is the trainer's to act on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    Service(socket.socket(fileno=arguments.socket)).serve(arguments.trainer_pid)


if __name__ == "__main__":
    main()
