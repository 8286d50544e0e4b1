"""Start the writing process, send it requests, and replace it if it dies or hangs.

Each save stays in its own buffer until it is durable, so a replacement process can resume it.
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
"""Seconds without a message after which the process is replaced; it sends two a second."""
_STARTING_S: Final = 60.0
_LOOK_EVERY_S: Final = 0.5
_STARTS_A_SAVE: Final = 3
"""The number of processes that are started for one save; if the last one dies, the save fails."""
_ENDING_S: Final = 5.0
"""Seconds that the process may spend deleting old checkpoints after the last save.

The next job deletes the rest.
"""


class _Stalled(Exception):
    """Report that a process sends messages but writes nothing; the message has the duration."""


class NotAttestedError(SaveFailed):
    """Report that written bytes differ from the live tensors, in the layout's `pieces`."""

    def __init__(self, message: str, pieces: list[int]) -> None:
        super().__init__(message)
        self.pieces = pieces


@dataclass(frozen=True, kw_only=True)
class WriteResult:
    """Describe a durable save.

    Attributes:
        seconds: the time from the start of the write until the checkpoint of all ranks was durable;
            0 if the process died before its report.
        digest: the digest of the checkpoint's manifest; None on ranks other than 0, or if the
            process died before its report.
        size_bytes: the total size of all ranks' files; None in the same cases as `digest`.
        differing: the replicated entries that differ between ranks, if they were compared; empty on
            ranks other than 0.
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
        """Complete the future of this save: durable if `failure` is empty, else failed."""
        if not failure:
            self.ended.set_result(WriteResult())
            return
        advice = "Check the memory and the storage of this node."
        self.ended.set_exception(
            SaveFailed(f"Step {self.order.step} was not saved: {failure}. {advice}")
        )


class Writer:
    """Start, use and replace the writing process of one rank."""

    def __init__(
        self, *, timeout_s: float, max_write_bytes_s: float | None, keep_s: float = 0.0
    ) -> None:
        """Create the object; the first save starts the process.

        Args:
            timeout_s: seconds without a byte written, or seconds of waiting for other ranks, after
                which a save fails.
            max_write_bytes_s: the limit on the write rate in bytes/s; None for no limit.
            keep_s: seconds that the process keeps the newest snapshot in memory after the trainer
                has died, for a replacement trainer; see `memory.server`.
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
        """The newest step known to be in the peer's memory, or -1."""

    @property
    def pid(self) -> int | None:
        """Return the id of the writing process, or None if none was started."""
        return self._process.pid if self._process is not None else None

    def share_arena(self, arena: Arena) -> int:
        """Send a buffer to the process, and return its number.

        This object owns the buffer from now on, and closes it.
        """
        with self._lock:
            self._numbers += 1
            self._arenas[self._numbers] = arena
            if self._socket is not None:
                self._send({"arena": self._numbers}, arena.fd)
            return self._numbers

    def share_layout(self, layout: Layout) -> int:
        """Send the layout of a rank's files to the process, and return the layout's number."""
        fd = os.memfd_create("holdfast-layout", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(layout.pack())
        with self._lock:
            self._numbers += 1
            self._layouts[self._numbers] = fd, layout
            if self._socket is not None:
                self._send({"layout": self._numbers}, fd)
            return self._numbers

    def pair(self, pairing: Pairing, *, max_bytes: float | None) -> None:
        """Send the address of this rank's peer to the process.

        The peer is a rank on another node; each keeps a snapshot of the other. This object owns the
        listening socket from now on, and closes it.

        Args:
            pairing: the peer, and the listening socket for it.
            max_bytes: the limit on the memory that the process uses for this rank's and for peers'
                snapshots; None for no limit.
        """
        with self._lock:
            self._pairing = pairing, max_bytes
            self._send_peer()

    def _send_peer(self) -> None:
        if self._pairing is not None and self._socket is not None:
            pairing, max_bytes = self._pairing
            self._send({"peer": pairing.message(max_bytes)}, pairing.listener.fileno())

    def forget(self, arenas: list[int], layouts: list[int]) -> None:
        """Release buffers and layouts that no save needs any more."""
        with self._lock:
            for number in arenas:
                arena = self._arenas.pop(number)
                arena.empty()
                arena.close()
            for number in layouts:
                os.close(self._layouts.pop(number)[0])
            self._send({"forget": {"arenas": arenas, "layouts": layouts}})

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
        """Request that the process writes the snapshot in a buffer and makes it durable.

        See `persist.RankWrite` for `replicas` and `refuses`.

        Returns:
            A future of the result; it fails with SaveFailed or NotAttestedError.

        Raises:
            OSError: the process cannot be started.
            RuntimeError: the thread that receives from the process cannot be started, or the
                interpreter is ending.
        """
        with self._lock:
            known = self._layouts[layout][1]
            outstanding = _Outstanding(
                order, arena, generation, layout, known, attested_bytes, replicas, refuses
            )
            if self._socket is None:
                self._start()
            self._outstanding[arena, generation] = outstanding
            self._send_new(outstanding)
        return outstanding.ended

    def close(self, *, in_good_order: bool = True) -> None:
        """End the process; saves that are still outstanding fail.

        If training does not end `in_good_order`, the process continues to run, and keeps the newest
        snapshot in memory for a restarted trainer.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._socket is not None:
                if in_good_order:
                    self._send({"closed": True})
                with contextlib.suppress(OSError):  # the process has just died
                    self._socket.shutdown(socket.SHUT_RDWR)
            process = self._process
        if process is not None and in_good_order:
            try:
                process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()  # hanging storage may hold the process for ever
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
        """Start a process and the thread that receives its messages.

        Then send the process all buffers, all layouts, and all saves that have not ended.
        """
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
                start_new_session=True,  # signals to the trainer's process group must not end it
            )
            undo.callback(_end, process)
            hearing = threading.Thread(
                target=self._receive, args=(ours, process), name="holdfast-writer", daemon=True
            )
            hearing.start()  # before a save relies on it: only this thread completes the futures
            undo.pop_all()
        self._process, self._socket = process, ours
        self._send_peer()
        for number, arena in self._arenas.items():
            self._send({"arena": number}, arena.fd)
        for number, (fd, _layout) in self._layouts.items():
            self._send({"layout": number}, fd)
        for outstanding in self._outstanding.values():
            self._send_new(outstanding)

    def _send_new(self, outstanding: _Outstanding) -> None:
        message = outstanding.message(self._timeout_s, self._max_write_bytes_s)
        if not outstanding.replicas:
            self._send(message)
            return
        fd = os.memfd_create("holdfast-replicas", os.MFD_CLOEXEC)
        with os.fdopen(fd, "wb") as file:
            file.write(outstanding.replicas)
            file.flush()
            self._send(message, fd)

    def _send(self, message: dict[str, Any], fd: int | None = None) -> None:
        try:
            if self._socket is not None:
                send(self._socket, message, fd)
        # The process is dead; the receiving thread starts another one and sends this again.
        except OSError:
            _logger.debug("the writing process does not accept saves")

    def _receive(self, line: socket.socket, process: "subprocess.Popen[bytes]") -> None:
        """Receive messages until the process ends or hangs, then replace the process if needed.

        A replacement is needed if some requested saves have not ended.
        """
        has_stalled = False
        try:
            why = self._listen(line)
        except _Stalled as stalled:
            why, has_stalled = str(stalled), True
        except Exception as error:  # without this thread no future would be completed
            _logger.exception("A message from the writing process could not be read.")
            why = f"a message from it could not be read ({error})"
        # A closed client lets the process delete old checkpoints, or keep its snapshot.
        if not self._closed:
            process.send_signal(signal.SIGKILL)
        with self._lock:  # held throughout, else a concurrent save would also start a process
            line.close()
            self._socket = None
            ended = (
                self._give_up("it was closed")
                if self._closed
                else self._start_again(why, has_stalled=has_stalled)
            )
            # Hanging storage would hold this thread, and delay the end of the trainer.
            failed = [] if has_stalled or self._closed else [each for each in ended if each[1]]

        def abandon_failed() -> None:
            for outstanding, failure in failed:
                abandon(outstanding.order, outstanding.layout, failure)

        if failed:  # first, because the trainer may exit as soon as its future is completed
            _within(_ENDING_S, abandon_failed)
        for outstanding, failure in ended:  # without the lock, which a callback may need
            outstanding.settle(failure)
        for outstanding, _failure in failed:
            discard_abandoned(outstanding.order, outstanding.layout)
        process.wait()  # hanging storage may delay its end

    def _listen(self, line: socket.socket) -> str:
        """Receive the messages of a process until it dies or is silent; return which of the two.

        Raises:
            _Stalled: the process sends messages but writes nothing.
        """
        looked_s = time.monotonic()
        ran_s = moved_s = 0.0
        heard_s = _STARTING_S  # imports come first, and are slow on a network file system
        moves = -1
        while True:
            has_said = bool(readable([line.fileno()], _LOOK_EVERY_S))
            now_s = time.monotonic()
            # A much larger difference means that this process was suspended, and perhaps the
            # writing process, too. So at most two intervals are counted.
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
                # A request may have come since the last look, up to _LOOK_EVERY_S ago.
                elif ran_s - moved_s > self._timeout_s + _LOOK_EVERY_S:
                    raise _Stalled(f"nothing was written for {self._timeout_s:g} s")
            if ran_s - heard_s > _SILENT_S:
                return f"it sent nothing for {_SILENT_S:g} s"

    def _start_again(self, why: str, *, has_stalled: bool) -> list[tuple[_Outstanding, str]]:
        """Start another process for the saves that have not ended.

        If the last process `has_stalled`, the save that it was writing fails, since another process
        would stall, too. If it stalled while it was deleting files, no save fails.

        Returns:
            The saves that have ended, each with the reason of its failure, or with "" if it is
            durable.
        """
        ended = []
        for place, (key, outstanding) in enumerate(list(self._outstanding.items())):
            arena = self._arenas[outstanding.arena]
            had_begun, outstanding.has_begun = outstanding.has_begun, False
            # A save queued behind another one did not cause the death of the process.
            outstanding.starts += had_begun or place == 0
            if arena.state is State.COMMITTED:
                ended.append((self._outstanding.pop(key), ""))
            elif has_stalled and had_begun:
                ended.append((self._outstanding.pop(key), why))
                self._free(outstanding)
            elif arena.state is State.FREE or outstanding.starts > _STARTS_A_SAVE:
                failure = f"the process that writes it was started {_STARTS_A_SAVE} times; the last time, {why}"
                ended.append((self._outstanding.pop(key), failure))
                self._free(outstanding)
            elif arena.state is State.WRITING:
                arena.move(State.SEALED, outstanding.generation)
        if self._outstanding:
            _logger.warning("The process that writes checkpoints is restarted: %s.", why)
            try:
                self._start()
            except (OSError, RuntimeError) as error:  # no process, or no thread to receive from it
                ended += self._give_up(
                    f"the process that writes it cannot be started ({in_words(error)})"
                )
        return ended

    def _give_up(self, why: str) -> list[tuple[_Outstanding, str]]:
        """Remove all saves that have not ended; return each with the reason `why` it failed."""
        failing = list(self._outstanding.values())
        self._outstanding.clear()
        for outstanding in failing:
            self._free(outstanding)
        return [(outstanding, why) for outstanding in failing]

    def _free(self, outstanding: _Outstanding) -> None:
        with contextlib.suppress(ArenaError):  # the buffer is free already
            self._arenas[outstanding.arena].move(State.FREE, outstanding.generation)

    def _began(self, message: dict[str, Any]) -> None:
        with self._lock:
            if (
                outstanding := self._outstanding.get((message["arena"], message["generation"]))
            ) is not None:
                outstanding.has_begun = True

    def _ended(self, message: dict[str, Any]) -> None:
        with self._lock:
            outstanding = self._outstanding.pop((message["arena"], message["generation"]), None)
        if outstanding is None:
            return
        if "pieces" in message:
            outstanding.ended.set_exception(NotAttestedError(message["failed"], message["pieces"]))
        elif "failed" in message:
            failed = SaveFailed(message["failed"])
            failed.errno, failed.is_final = message["errno"], message["is_final"]
            outstanding.ended.set_exception(failed)
        else:
            names = ("seconds", "digest", "size_bytes")
            differing = (
                Differing.of_json(message["differing"]) if "differing" in message else Differing()
            )
            found = {name: message[name] for name in names if name in message}
            outstanding.ended.set_result(WriteResult(**found, differing=differing))


def _within(limit_s: float, work: Callable[[], None]) -> None:
    """Run `work` in a thread and wait at most `limit_s` seconds for it, since storage may hang.

    If no thread can be started, `work` does not run.
    """
    working = threading.Thread(target=work, name="holdfast-tells", daemon=True)
    with contextlib.suppress(RuntimeError):
        working.start()
        working.join(limit_s)


def _emit(kind: str, data: dict[str, Any]) -> None:
    """Send an event to the supervisor.

    An error is logged and not raised, because it must not end the calling thread.
    """
    try:
        job_link().emit(kind, data)
    except Exception:
        _logger.exception("The event %s was not sent.", kind)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_ENDING_S)
