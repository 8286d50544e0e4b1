"""Import harnesses once, then fork processes, in one thread without an event loop.

The command is `python -m holdfast.evaluate.harness.zygote CONTROL NODE`, where CONTROL is the file
descriptor of an inherited socket (of type SOCK_SEQPACKET). The host sends the orders `prepare` and
`fork N`, each with a socket for the messages that follow. The zygote replies `started N PID` and
`exited N STATUS`.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.core.processes import become_subreaper, die_with_parent, end_without_collecting
from holdfast.evaluate.harness.child import work
from holdfast.evaluate.harness.choose import harness
from holdfast.evaluate.harness.failure import sentence
from holdfast.evaluate.harness.jobs import frame, receive
from holdfast.evaluate.types.harness import Rehearsing
from holdfast.evaluate.wire.messages import Prepare, Prepared

if TYPE_CHECKING:
    from holdfast.evaluate.types.harness import Harness


class Zygote:
    """Import harnesses and fork processes as the host orders."""

    def __init__(self, control: socket.socket, node: int) -> None:
        self._control, self._node = control, node
        self._harnesses: dict[str, Harness] = {}
        self._logs = Path()
        self._numbers: dict[int, int] = {}  # numbers of children, by process id

    def serve(self) -> None:
        """Carry out the host's orders until it closes the socket."""
        woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the host handles Ctrl-C
        while True:
            readable, _, _ = select.select([self._control.fileno(), woken], [], [])
            if woken in readable:
                os.read(woken, 4096)
                self._reap()
            if self._control.fileno() in readable:
                try:
                    order, descriptors, _flags, _from = socket.recv_fds(self._control, 256, 1)
                except ConnectionResetError:  # the host was killed before it read all messages
                    return
                if not order:
                    return
                with socket.socket(fileno=descriptors[0]) as channel:
                    self._obey(order.decode(), channel)

    def _obey(self, order: str, channel: socket.socket) -> None:
        if order == "prepare":
            channel.sendall(frame(self._prepare(channel)))
            return
        number = int(order.removeprefix("fork "))
        own_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_child(channel, own_pid)
        self._numbers[pid] = number
        self._control.send(f"started {number} {pid}".encode())

    def _prepare(self, channel: socket.socket) -> Prepared:
        order = receive(channel)
        assert isinstance(order, Prepare), order
        self._logs = Path(order.folder) / "logs"
        gc.disable()  # imports create little garbage, which is collected below
        try:
            for name in dict.fromkeys(entry.harness for entry in order.entries):
                self._harnesses[name] = harness(
                    name,
                    include_paths=order.include_paths,
                    confirm_unsafe_code=order.confirm_unsafe_code,
                )
                self._harnesses[name].prepare(
                    [entry for entry in order.entries if entry.harness == name]
                )
                if isinstance(rehearsing := self._harnesses[name], Rehearsing):
                    rehearsing.rehearse()
            versions = {name: known.version() for name, known in self._harnesses.items()}
        except Exception as error:
            return Prepared(error=sentence(error))
        finally:
            gc.enable()
        gc.collect()
        gc.freeze()  # present objects stay, in pages that children share
        return Prepared(versions=versions)

    def _become_child(self, channel: socket.socket, zygote_pid: int) -> None:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            work(channel, self._harnesses, node=self._node, logs=self._logs, zygote_pid=zygote_pid)
            status = 0
        except (BrokenPipeError, ConnectionResetError):
            status = 0  # the host is gone, or dropped this job
        except BaseException:
            traceback.print_exc()  # into the host's log, the only record
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)  # skips the parent's exit handlers

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            # Kill the child's process group before reaping the child: until then, the group's id
            # cannot be reused.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            if (number := self._numbers.pop(ended.si_pid, None)) is not None:
                self._control.send(f"exited {number} {os.waitstatus_to_exitcode(status)}".encode())


def main() -> None:
    """Run the zygote with the command line's arguments."""
    die_with_parent()
    end_without_collecting()
    become_subreaper()  # orphans of children are reaped here, and end with the host
    control = socket.socket(fileno=int(sys.argv[1]))
    Zygote(control, int(sys.argv[2])).serve()


if __name__ == "__main__":
    main()
