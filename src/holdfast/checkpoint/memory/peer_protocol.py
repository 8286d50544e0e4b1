"""Define the TCP protocol by which a writing process sends its snapshot to a peer node.

| sent by the writing process | meaning |
|---|---|
| a greeting (see `core.channel`) | the name of the protocol, and the holder's token |
| a frame: the fields of `SnapshotInfo`, and `notes` | the announcement; `notes` is a digest of the notes |
| the notes (see `DurableSnapshot.pack_notes`) and the files | sent after the first answer |

The peer that holds the snapshot answers twice, before anything large is sent and once every byte is
verified. Each answer is a frame, `{"taken": true}` or `{"refused": WHY}`. A sender without the
token receives no answer. No data is unpickled, so a sender cannot run code.
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
"""Seconds without a received byte after which a side treats the connection as dead."""
ANSWER_S: Final = 60.0
"""Seconds to wait for an answer, since the peer first allocates memory for the snapshot."""
CHUNK_BYTES: Final = 4 << 20
_ANNOUNCEMENT_BYTES: Final = 4096
_ANSWER_BYTES: Final = 1024


class Refused(Exception):
    """Report a refusal or invalid data from the other side; the message has the reason."""


def digest_of_notes(notes: bytes) -> str:
    """Return the digest of a snapshot's notes that its announcement contains."""
    return xxhash.xxh3_128_hexdigest(notes)


def head(token: bytes, announcement: dict[str, Any]) -> bytes:
    """Return the first bytes of a sender: the greeting with the token, and the announcement."""
    return greeting(MAGIC, token) + frame(json.dumps(announcement).encode(), _ANNOUNCEMENT_BYTES)


def read_announcement(line: socket.socket) -> dict[str, Any]:
    """Receive the announcement of a snapshot from a sender that has presented the token.

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
    """Answer the sender: the snapshot is taken, or refused for the reason `refused`.

    Raises:
        OSError: the sender has closed the connection or died.
    """
    reply = {"refused": refused[: _ANSWER_BYTES // 8]} if refused else {"taken": True}
    line.sendall(frame(json.dumps(reply).encode(), _ANSWER_BYTES))


def await_answer(line: socket.socket) -> None:
    """Wait for the peer's answer that the snapshot is taken.

    Raises:
        Refused: the peer refuses the snapshot.
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
    """Fill `target` from the socket; wait as long as bytes keep arriving.

    Raises:
        OSError: no byte arrived for `PATIENCE_S` seconds.
    """
    line.settimeout(PATIENCE_S)
    receive_into(line, target)
