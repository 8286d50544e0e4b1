"""Send and receive the messages between a trainer and its writing process.

Each message is one packet with one JSON object. Some messages also carry a file descriptor. An
arena is a shared buffer for one snapshot, a layout describes the files of one rank, and a
generation is the number of one use of an arena.

| to the writing process | meaning |
|---|---|
| `{"layout": L}` and a file with the packed layout | later messages refer to this layout as L |
| `{"arena": A}` and the arena's file | later messages refer to this arena as A |
| `{"save": …, "arena": A, "generation": G, "layout": L, …}`, maybe a file | see `Writer.save`; the file has digests |
| `{"forget": {"arenas": […], "layouts": […]}}` | release these, since no save needs them any more |
| `{"peer": {…}}` and a bound socket | see `memory.peer.Pairing` |
| `{"closed": true}` | the trainer closed its Checkpointer, so keep no snapshot in memory |

| from the writing process | meaning |
|---|---|
| `{"alive": MOVES}` | a sign of life; MOVES changes with each write, deletion, or wait for other ranks |
| `{"began": {"arena", "generation"}}` | the process has begun this save |
| `{"ended": {"arena", "generation", "seconds"}}` | the save is durable |
| `{"ended": {…, "failed", "errno", "pieces"}}` | the save failed; `pieces` differ from the live tensors |
| `{"held": STEP}` | the peer holds this step |
| `{"made_room": {"folder", "deleted", "size_bytes"}}` | the disk was full, and this checkpoint was deleted |
"""

import array
import json
import socket
from typing import Any, Final

WRITER_MODULE: Final = "holdfast.checkpoint.writer.process"
"""The Python module that is run as the writing process."""
ENV_SUPERVISOR_PID: Final = "HOLDFAST_SUPERVISOR_PID"
"""The environment variable with the id of the supervisor's process; when it ends, writing processes
that serve snapshots end as well.
"""
SNAPSHOT_SERVER_PROCESS_NAME: Final = "holdfast-kept"
"""The name of a process that only serves snapshots, by which job cleanup tools can find it."""
_MAX_BYTES: Final = 1 << 16


def send(
    to: socket.socket, message: dict[str, Any], fd: int | None = None, *, may_wait: bool = True
) -> None:
    """Send one message, and a file descriptor if `fd` is given.

    Raises:
        BlockingIOError: the socket is full of unread messages, and `may_wait` is False.
        OSError: the receiver has closed the socket or died.
    """
    data = json.dumps(message).encode()
    assert len(data) <= _MAX_BYTES, "what is long travels as a descriptor"
    rights = (
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
    )
    to.sendmsg([data], rights, socket.MSG_NOSIGNAL | (0 if may_wait else socket.MSG_DONTWAIT))


def receive(by: socket.socket) -> tuple[dict[str, Any], int | None] | None:
    """Receive the next message and its file descriptor, if it has one.

    Returns None if the sender has closed the socket or died.

    Raises:
        OSError: the socket broke.
    """
    data, ancillary, _flags, _address = by.recvmsg(
        _MAX_BYTES, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for _level, _type, content in ancillary:
        fds.frombytes(content[:4])
    if not data:
        return None
    return json.loads(data), fds[0] if fds else None
