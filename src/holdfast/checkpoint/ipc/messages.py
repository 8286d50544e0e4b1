"""What a trainer and its writing process say to each other: JSON objects, one a packet, some with a descriptor.

| to the writing process | meaning |
|---|---|
| `{"layout": L}` and the packed layout | it is called L from now on |
| `{"arena": A}` and the arena | it is called A |
| `{"save": …, "arena": A, "generation": G, "layout": L, …}` and maybe a file | see `commit.Order` and `Writer.save` |
| `{"forget": {"arenas": […], "layouts": […]}}` | no save needs them any more |
| `{"peer": {…}}` and a bound socket | see `peer_memory.Pairing` |
| `{"closed": true}` | the trainer ends in good order: nothing is to be kept for a successor |

| from it | meaning |
|---|---|
| `{"alive": MOVES}` | it lives; the number changes where it has written, deleted, or waited for others by itself |
| `{"began": {"arena", "generation"}}` | it is at this save now |
| `{"ended": {"arena", "generation", "seconds"}}` | durable |
| `{"held": STEP}` | the peer holds this step |
| `{"made_room": {"folder", "deleted", "size_bytes"}}` | the disk is full, and this checkpoint was deleted |
| `{"ended": {…, "failed", "errno", "pieces"}}` | not, and why; `pieces`: those that are not what the live bytes were |
"""

import array
import json
import socket
from typing import Any, Final

WRITER_MODULE: Final = "holdfast.checkpoint.writer.process"
"""What is run as the writing process."""
_MAX_BYTES: Final = 1 << 16


def send(
    to: socket.socket, message: dict[str, Any], fd: int | None = None, *, may_wait: bool = True
) -> None:
    """Send one message.

    Raises:
        BlockingIOError: nobody has read the ones before it, and it may not wait for that.
        OSError: nobody is there.
    """
    data = json.dumps(message).encode()
    assert len(data) <= _MAX_BYTES, "what is long travels as a descriptor"
    rights = (
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
    )
    to.sendmsg([data], rights, socket.MSG_NOSIGNAL | (0 if may_wait else socket.MSG_DONTWAIT))


def receive(by: socket.socket) -> tuple[dict[str, Any], int | None] | None:
    """The next message and its descriptor; None where the other side is gone.

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
