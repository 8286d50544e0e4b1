"""The trainer's side of the writing process: starts it, gives it orders, and starts another one where it dies or hangs.

An order is in one arena until it is durable, so that whatever happens to the process, the next one finds it sealed.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.checkpoint.format.rank_layout import Layout
from holdfast.checkpoint.format.replica_digests import Differing
from holdfast.checkpoint.ipc.messages import WRITER_MODULE, receive, send
from holdfast.checkpoint.ipc.save_request import SaveRequest
from holdfast.checkpoint.ipc.shared_buffer import Arena, ArenaError, State
from holdfast.checkpoint.memory.peer import Pairing
from holdfast.checkpoint.writer.persist import abandon, discard_abandoned
from holdfast.core.errors import SaveFailed
from holdfast.core.link import job_link
from holdfast.core.processes import module_command
from holdfast.core.sockets import readable
from holdfast.core.system_limits import in_words

_logger = logging.getLogger("holdfast")
_SILENT_S: Final = 15.0
"""The process says twice a second that it lives; one that is silent for so long is stopped, or swapped out for good."""
_STARTING_S: Final = 60.0
_LOOK_EVERY_S: Final = 0.5
_STARTS_A_SAVE: Final = 3
"""Processes that may die of one save; it fails with the last."""
_ENDING_S: Final = 5.0
"""For what it is deleting when all is saved; what is left of that, the next job deletes."""


class _Stalled(Exception):
    """A process says that it lives, and writes nothing; the message says for how long."""


class NotAttestedError(SaveFailed):
    """The staged bytes are not those of the live tensors; `pieces` are the indices in the layout's list."""

    def __init__(self, message: str, pieces: list[int]) -> None:
        super().__init__(message)
        self.pieces = pieces


@dataclass(frozen=True, kw_only=True)
class WriteResult:
    """A save that is durable.

    Attributes:
        seconds: from when its writing began until all ranks' parts were there; 0: the process died before it said so.
        digest: of the manifest; None there too, and on other ranks than 0.
        size_bytes: of the files of all ranks; None likewise.
        differing: what ranks have alike by name and not by content, where that was compared; on rank 0.
    """

    seconds: float = 0.0
    digest: str | None = None
    size_bytes: int | None = None
    differing: Differing = field(default_factory=Differing)


@dataclass
class _Outstanding:
    order: SaveRequest
    arena: int
    generation: int
    layout_number: int
    layout: Layout
    attested_bytes: int
    replicas: bytes = b""
    refuses: bool = False
    ended: Future[WriteResult] = field(default_factory=Future)
    starts: int = 1
    has_begun: bool = False

    def message(self, timeout_s: float, max_write_bytes_s: float | None) -> dict[str, Any]:
        return {
            "save": self.order.as_json(),
            "arena": self.arena,
            "generation": self.generation,
            "layout": self.layout_number,
            "attested_bytes": self.attested_bytes,
            "refuses": self.refuses,
            "timeout_s": timeout_s,
            "max_write_bytes_s": max_write_bytes_s,
        }

    def settle(self, failure: str) -> None:
        """Tell whoever waits that it is durable, or why it failed."""
        if not failure:
            self.ended.set_result(WriteResult())
            return
        advice = "Look at the memory and the storage of this node."
        self.ended.set_exception(
            SaveFailed(f"Step {self.order.step} was not saved: {failure}. {advice}")
        )


class Writer:
    """One rank's writing process."""

    def __init__(
        self, *, timeout_s: float, max_write_bytes_s: float | None, keep_s: float = 0.0
    ) -> None:
        """Nothing is started before the first order.

        Args:
            timeout_s: how long a save may go on without a byte written, or wait for other ranks, before it fails.
            max_write_bytes_s: a limit to the rate; None: none.
            keep_s: how long the process keeps the newest snapshot for a successor of this one, see `keeping`.
        """
        self._keep_s = keep_s
        self._timeout_s = timeout_s
        self._max_write_bytes_s = max_write_bytes_s
        self._arenas: dict[int, Arena] = {}
        self._layouts: dict[int, tuple[int, Layout]] = {}
        self._outstanding: dict[tuple[int, int], _Outstanding] = {}
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._numbers = 0
        self._closed = False
        self._pairing: tuple[Pairing, float | None] | None = None
        self.held_step = -1
        """The last one that the peer holds in memory, as far as is known."""

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return self._process.pid if self._process is not None else None

    def share_arena(self, arena: Arena) -> int:
        """Let the process know an arena; its number. It stays this object's to close."""
        with self._lock:
            self._numbers += 1
            self._arenas[self._numbers] = arena
            if self._socket is not None:
                self._tell({"arena": self._numbers}, arena.fd)
            return self._numbers

    def share_layout(self, layout: Layout) -> int:
        """Let the process know a layout; its number."""
        fd = os.memfd_create("holdfast-layout", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(layout.pack())
        with self._lock:
            self._numbers += 1
            self._layouts[self._numbers] = fd, layout
            if self._socket is not None:
                self._tell({"layout": self._numbers}, fd)
            return self._numbers

    def pair(self, pairing: Pairing, *, max_bytes: float | None) -> None:
        """Let the process know its peer; the listener is this object's to close.

        Args:
            pairing: who it is.
            max_bytes: what the process may hold for others and for this rank together; None: as much as there is.
        """
        with self._lock:
            self._pairing = pairing, max_bytes
            self._tell_of_peer()

    def _tell_of_peer(self) -> None:
        if self._pairing is not None and self._socket is not None:
            pairing, max_bytes = self._pairing
            self._tell({"peer": pairing.message(max_bytes)}, pairing.listener.fileno())

    def forget(self, arenas: list[int], layouts: list[int]) -> None:
        """Let go of what no save needs any more."""
        with self._lock:
            for number in arenas:
                arena = self._arenas.pop(number)
                arena.empty()
                arena.close()
            for number in layouts:
                os.close(self._layouts.pop(number)[0])
            self._tell({"forget": {"arenas": arenas, "layouts": layouts}})

    def save(
        self,
        order: SaveRequest,
        *,
        arena: int,
        generation: int,
        layout: int,
        attested_bytes: int,
        replicas: bytes = b"",
        refuses: bool = False,
    ) -> "Future[WriteResult]":
        """Order the image in a sealed arena to be made durable; `replicas` and `refuses`: see `persist.Part`.

        Returns:
            What there is, once it is durable; else SaveFailed, or NotAttestedError.

        Raises:
            OSError: no process could be started.
            RuntimeError: no thread could, or the interpreter ends.
        """
        with self._lock:
            known = self._layouts[layout][1]
            outstanding = _Outstanding(
                order, arena, generation, layout, known, attested_bytes, replicas, refuses
            )
            if self._socket is None:
                self._start()
            self._outstanding[arena, generation] = outstanding
            self._tell_of(outstanding)
        return outstanding.ended

    def close(self, *, in_good_order: bool = True) -> None:
        """End the process; nothing may be outstanding, and what is, fails.

        Where the training does not end `in_good_order`, it is let go, and keeps what it is to keep.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._socket is not None:
                if in_good_order:
                    self._tell({"closed": True})
                with contextlib.suppress(OSError):  # it has just died
                    self._socket.shutdown(socket.SHUT_RDWR)
            process = self._process
        if process is not None and in_good_order:
            try:
                process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()  # storage that hangs may hold it for ever: nobody waits for that
        with self._lock:
            ended = self._give_up("it was closed")
            for arena in self._arenas.values():
                arena.close()
            for fd, _layout in self._layouts.values():
                os.close(fd)
            self._arenas.clear()
            self._layouts.clear()
            if self._pairing is not None:
                self._pairing[0].listener.close()
        for outstanding, failure in ended:
            outstanding.settle(failure)

    def _start(self) -> None:
        """Start a process and the thread that hears it, and tell it all that it has to know."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            command, environment = module_command(WRITER_MODULE)
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), str(self._keep_s)],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # what ends the trainer's group must not end it
            )
            undo.callback(_end, process)
            hearing = threading.Thread(
                target=self._hear, args=(ours, process), name="holdfast-writer", daemon=True
            )
            hearing.start()  # before anybody relies on it: a process that nobody hears would be waited for for ever
            undo.pop_all()
        self._process, self._socket = process, ours
        self._tell_of_peer()
        for number, arena in self._arenas.items():
            self._tell({"arena": number}, arena.fd)
        for number, (fd, _layout) in self._layouts.items():
            self._tell({"layout": number}, fd)
        for outstanding in self._outstanding.values():
            self._tell_of(outstanding)

    def _tell_of(self, outstanding: _Outstanding) -> None:
        message = outstanding.message(self._timeout_s, self._max_write_bytes_s)
        if not outstanding.replicas:
            self._tell(message)
            return
        fd = os.memfd_create("holdfast-replicas", os.MFD_CLOEXEC)
        with os.fdopen(fd, "wb") as file:
            file.write(outstanding.replicas)
            file.flush()
            self._tell(message, fd)

    def _tell(self, message: dict[str, Any], fd: int | None = None) -> None:
        try:
            if self._socket is not None:
                send(self._socket, message, fd)
        except (
            OSError
        ):  # it is dead; the thread that hears it starts another one, and tells that one
            _logger.debug("the writing process does not take orders")

    def _hear(self, line: socket.socket, process: "subprocess.Popen[bytes]") -> None:
        """Take what one process says, until it ends or is ended; then start another one, if there is need of it."""
        has_stalled = False
        try:
            why = self._listen(line)
        except _Stalled as stalled:
            why, has_stalled = str(stalled), True
        except Exception as error:  # without this thread nobody would ever hear how a save ends
            _logger.exception("What the writing process said was not understood.")
            why = f"it was not understood ({error})"
        if (
            not self._closed
        ):  # else it may still be deleting what is not to be kept, or keeps what is
            process.send_signal(signal.SIGKILL)
        with self._lock:  # in one go: whoever saves meanwhile would start a process, too
            line.close()
            self._socket = None
            ended = (
                self._give_up("it was closed")
                if self._closed
                else self._start_again(why, has_stalled=has_stalled)
            )
            # Storage that hangs would hold this thread, and the trainer's end.
            failed = [] if has_stalled or self._closed else [each for each in ended if each[1]]

        def tell_others() -> None:
            for outstanding, failure in failed:
                abandon(outstanding.order, outstanding.layout, failure)

        if failed:  # first: the trainer may end as soon as it hears of it, and this thread with it
            _within(_ENDING_S, tell_others)
        for outstanding, failure in ended:  # without the lock: who is told may need it
            outstanding.settle(failure)
        for outstanding, _failure in failed:
            discard_abandoned(outstanding.order, outstanding.layout)
        process.wait()  # storage that hangs holds it for a while yet

    def _listen(self, line: socket.socket) -> str:
        """Why what one process says has come to its end.

        Raises:
            _Stalled: it lives and gets nowhere.
        """
        looked_s = time.monotonic()
        ran_s = moved_s = 0.0
        heard_s = _STARTING_S  # it reads its modules first, which may take a while where they lie on a network
        moves = -1
        while True:
            has_said = bool(readable([line.fileno()], _LOOK_EVERY_S))
            now_s = time.monotonic()
            # Where it is much longer, this process was stopped, and maybe that one was, too.
            ran_s += min(now_s - looked_s, 2 * _LOOK_EVERY_S)
            looked_s = now_s
            if not self._outstanding:
                moved_s = ran_s
            if has_said:
                try:
                    received = receive(line)
                except OSError:
                    received = None
                if received is None:
                    return "it died"
                heard_s = ran_s
                message, _fd = received
                if "began" in message:
                    self._began(message["began"])
                    moved_s = ran_s
                elif "ended" in message:
                    self._ended(message["ended"])
                    moved_s = ran_s
                elif "held" in message:
                    self.held_step = message["held"]
                elif "made_room" in message:
                    _emit("disk_full", message["made_room"])
                elif message["alive"] != moves:
                    moves, moved_s = message["alive"], ran_s
                # An order may be as much younger than the last look. One that is silent is another matter.
                elif ran_s - moved_s > self._timeout_s + _LOOK_EVERY_S:
                    raise _Stalled(f"nothing was written for {self._timeout_s:g} s")
            if ran_s - heard_s > _SILENT_S:
                return f"it was silent for {_SILENT_S:g} s"

    def _start_again(self, why: str, *, has_stalled: bool) -> list[tuple[_Outstanding, str]]:
        """Start another process for what is outstanding; what is not any more, and why it failed, if it did.

        Where the last one `has_stalled`, the save that it was at has failed: another one would wait as long. It may
        have been at none, but deleting.
        """
        ended = []
        for place, (key, outstanding) in enumerate(list(self._outstanding.items())):
            arena = self._arenas[outstanding.arena]
            had_begun, outstanding.has_begun = outstanding.has_begun, False
            outstanding.starts += (
                had_begun or place == 0
            )  # what waits behind another one has killed nothing
            if arena.state is State.COMMITTED:
                ended.append((self._outstanding.pop(key), ""))
            elif has_stalled and had_begun:
                ended.append((self._outstanding.pop(key), why))
                self._free(outstanding)
            elif arena.state is State.FREE or outstanding.starts > _STARTS_A_SAVE:
                failure = (
                    f"the process that writes it was started {_STARTS_A_SAVE} times; at last {why}"
                )
                ended.append((self._outstanding.pop(key), failure))
                self._free(outstanding)
            elif arena.state is State.WRITING:
                arena.move(State.SEALED, outstanding.generation)
        if self._outstanding:
            _logger.warning("The process that writes checkpoints is started again: %s.", why)
            try:
                self._start()
            except (OSError, RuntimeError) as error:  # no process, or no thread to hear it
                ended += self._give_up(
                    f"the process that writes it cannot be started ({in_words(error)})"
                )
        return ended

    def _give_up(self, why: str) -> list[tuple[_Outstanding, str]]:
        """Let all that is outstanding fail."""
        failing = list(self._outstanding.values())
        self._outstanding.clear()
        for outstanding in failing:
            self._free(outstanding)
        return [(outstanding, why) for outstanding in failing]

    def _free(self, outstanding: _Outstanding) -> None:
        with contextlib.suppress(ArenaError):  # it has been given up already
            self._arenas[outstanding.arena].move(State.FREE, outstanding.generation)

    def _began(self, said: dict[str, Any]) -> None:
        with self._lock:
            if (
                outstanding := self._outstanding.get((said["arena"], said["generation"]))
            ) is not None:
                outstanding.has_begun = True

    def _ended(self, said: dict[str, Any]) -> None:
        with self._lock:
            outstanding = self._outstanding.pop((said["arena"], said["generation"]), None)
        if outstanding is None:
            return
        if "pieces" in said:
            outstanding.ended.set_exception(NotAttestedError(said["failed"], said["pieces"]))
        elif "failed" in said:
            failed = SaveFailed(said["failed"])
            failed.errno, failed.is_final = said["errno"], said["is_final"]
            outstanding.ended.set_exception(failed)
        else:
            names = ("seconds", "digest", "size_bytes")
            differing = Differing.of_json(said["differing"]) if "differing" in said else Differing()
            found = {name: said[name] for name in names if name in said}
            outstanding.ended.set_result(WriteResult(**found, differing=differing))


def _within(limit_s: float, work: Callable[[], None]) -> None:
    """Do it, and go on after so many seconds at most: storage that hangs may hold it. Where no thread is left, not."""
    working = threading.Thread(target=work, name="holdfast-tells", daemon=True)
    with contextlib.suppress(RuntimeError):
        working.start()
        working.join(limit_s)


def _emit(kind: str, data: dict[str, Any]) -> None:
    """Send an event; a line that breaks must not end the thread that calls this."""
    try:
        job_link().emit(kind, data)
    except Exception:
        _logger.exception("The event %s was not sent.", kind)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_ENDING_S)
