"""Fork processes through the host's zygote; each has a socket to the host."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field

from holdfast.evaluate.harness.jobs import Job, frame, read
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.wire.messages import Prepare, Prepared

_ONE_THREAD = {
    # Use one thread: a process that forks must have one thread, and clients share the node's cores
    # with engines.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "TQDM_DISABLE": "1",
    "CUDA_VISIBLE_DEVICES": "",  # reserved for the engines
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


@dataclass(eq=False)
class Child:
    """A forked process."""

    number: int
    reader: asyncio.StreamReader = field(init=False)
    writer: asyncio.StreamWriter = field(init=False)
    pid: int = 0
    exited: "asyncio.Future[int]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def send(self, job: Job) -> None:
        """Send a job to the process."""
        self.writer.write(frame(job))

    def dismiss(self) -> None:
        """Close the socket, so that the process ends after its present job."""
        self.writer.close()

    def kill(self) -> None:
        """Kill the process."""
        if self.pid and not self.exited.done():
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """Run one zygote, and fork processes from it; `gone` is set if the zygote ends unexpectedly."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._children: dict[int, Child] = {}
        self._next = 0
        self.gone = asyncio.Event()

    async def start(self) -> None:
        """Start the zygote."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            name: value for name, value in os.environ.items() if name != "HF_ALLOW_CODE_EVAL"
        }
        with theirs:
            self._zygote = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "holdfast.evaluate.harness.zygote",
                    str(theirs.fileno()),
                    str(self._node),
                ],
                pass_fds=[theirs.fileno()],
                env={**environment, **_ONE_THREAD},
            )
        asyncio.get_running_loop().add_reader(self._control, self._receive)

    async def prepare(self, order: Prepare) -> Prepared:
        """Send the zygote the order to import harnesses and find tasks; return its reply."""
        reader, writer = await self._open("prepare")
        writer.write(frame(order))
        try:
            reply = await read(reader)
        except EOFError:
            return Prepared(
                error="The process that imports the harness died; its output is in the host's log."
            )
        finally:
            writer.close()
        assert isinstance(reply, Prepared), reply
        return reply

    async def fork(self) -> Child:
        """Fork a process; its `pid` is set once the zygote has reported it."""
        self._next += 1
        child = Child(self._next)
        self._children[child.number] = child  # before its first message
        child.reader, child.writer = await self._open(f"fork {child.number}")
        return child

    async def close(self) -> None:
        """End the zygote and all processes forked from it."""
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self._zygote.kill()
        self._zygote.wait()
        self._lose_all()

    def _lose_all(self) -> None:
        """Mark all children as ended, since they end when the zygote ends."""
        for child in self._children.values():
            child.exited.set_result(-signal.SIGKILL)
        self._children.clear()

    async def _open(self, order: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [order.encode()], [theirs.fileno()])
            except OSError:
                ours.close()
                raise EvaluationError("The parent of the harness's processes is gone.") from None
        return await asyncio.open_unix_connection(sock=ours)

    def _receive(self) -> None:
        try:
            reply = self._control.recv(256, socket.MSG_DONTWAIT).decode()
        except BlockingIOError:
            return
        except OSError:
            reply = ""
        if not reply:
            asyncio.get_running_loop().remove_reader(self._control)
            self._lose_all()
            self.gone.set()
            return
        word, number, value = reply.split()
        child = self._children[int(number)]
        if word == "started":
            child.pid = int(value)
        else:
            del self._children[child.number]
            child.exited.set_result(int(value))
