"""The protocol over TCP between a writing process and the peer node that holds its snapshot.

| from the sender | meaning |
|---|---|
| a greeting (see `core.channel`) | the name of the protocol, and the holder's token |
| a frame: the fields of `SnapshotInfo`, and `notes` | the announcement; `notes` is a digest of the notes |
| the notes (see `DurableSnapshot.pack_notes`) and the files | sent after the first answer |

The holder answers with a frame, `{"taken": true}` or `{"refused": WHY}`, twice: before the sender
sends anything large, and once every byte is verified. A sender without the token gets no answer.
Nothing is unpickled.
"""

import json
import socket
from typing import Any, Final

import xxhash

from holdfast.core.channel import frame, greeting, receive_frame, receive_into
from holdfast.core.errors import ChannelError

MAGIC: Final = b"HFPEER2\n"
TOKEN_BYTES: Final = 32
PATIENCE_S: Final = 10.0
"""Seconds without a byte after which the other side counts as gone."""
ANSWER_S: Final = 60.0
"""Seconds to wait for an answer: the holder allocates its memory first."""
CHUNK_BYTES: Final = 4 << 20
_ANNOUNCEMENT_BYTES: Final = 4096
_ANSWER_BYTES: Final = 1024


class Refused(Exception):
    """The other side refuses the snapshot, or has sent invalid data; the message states why."""


def digest_of_notes(notes: bytes) -> str:
    """Return the digest that verifies the notes."""
    return xxhash.xxh3_128_hexdigest(notes)


def head(token: bytes, announcement: dict[str, Any]) -> bytes:
    """Return the first bytes that a sender sends: the greeting and the announcement."""
    return greeting(MAGIC, token) + frame(json.dumps(announcement).encode(), _ANNOUNCEMENT_BYTES)


def read_announcement(line: socket.socket) -> dict[str, Any]:
    """Receive the announcement of a sender that has presented the token.

    Raises:
        Refused: the announcement is too long.
        OSError: nothing arrived in time.
        ValueError: the announcement is not JSON.
    """
    try:
        body = receive_frame(line, _ANNOUNCEMENT_BYTES, within_s=PATIENCE_S)
    except ChannelError as error:
        raise Refused(str(error)) from error
    announcement: dict[str, Any] = json.loads(body)
    return announcement


def answer(line: socket.socket, refused: str = "") -> None:
    """Send `taken`, or the reason `refused`.

    Raises:
        OSError: the sender is gone.
    """
    reply = {"refused": refused[: _ANSWER_BYTES // 8]} if refused else {"taken": True}
    line.sendall(frame(json.dumps(reply).encode(), _ANSWER_BYTES))


def await_answer(line: socket.socket) -> None:
    """Wait for the answer `taken` of the holder.

    Raises:
        Refused: the holder refuses the snapshot.
        OSError: no answer arrived in time.
    """
    try:
        reply = json.loads(receive_frame(line, _ANSWER_BYTES, within_s=ANSWER_S))
        line.settimeout(PATIENCE_S)
    except (ChannelError, ValueError) as error:
        raise Refused("its answer is not valid") from error
    if reply != {"taken": True}:
        raise Refused(
            str(reply.get("refused", reply))
            if isinstance(reply, dict)
            else "its answer is not valid"
        )


def read_into(line: socket.socket, target: memoryview) -> None:
    """Fill `target` from the socket, for any time as long as bytes arrive.

    Raises:
        OSError: no byte arrived for `PATIENCE_S`.
    """
    line.settimeout(PATIENCE_S)
    receive_into(line, target)
