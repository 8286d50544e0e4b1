"""What a writing process and the one on a peer node that holds its snapshot say to each other, over TCP.

| from the sender | meaning |
|---|---|
| a greeting (see `core.channel`) | what protocol this is, the holder's token |
| `{"rank", "world_size", "step", "save", "image_bytes", "notes_bytes", "notes"}` | a frame; `notes`: a digest |
| the notes, the files of the image | after the first answer; see `keeping.Snapshot.pack_notes` |

The holder answers with a frame, `{"taken": true}` or `{"refused": WHY}`, twice: before anything large is sent, and
once every byte is verified. To whoever does not have the token it says nothing. Nothing here is unpickled.
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
"""Without a byte in so long the other side is given up."""
ANSWER_S: Final = 60.0
"""For an answer: the holder takes its memory first."""
CHUNK_BYTES: Final = 4 << 20
_ANNOUNCEMENT_BYTES: Final = 4096
_ANSWER_BYTES: Final = 1024


class Refused(Exception):
    """The other side does not want it, or sent what cannot be; the message says why."""


def digest_of_notes(notes: bytes) -> str:
    """What tells that they arrived as they were."""
    return xxhash.xxh3_128_hexdigest(notes)


def head(token: bytes, announcement: dict[str, Any]) -> bytes:
    """What a sender says first."""
    return greeting(MAGIC, token) + frame(json.dumps(announcement).encode(), _ANNOUNCEMENT_BYTES)


def read_announcement(line: socket.socket) -> dict[str, Any]:
    """What a sender, who has shown the token, says that it will send.

    Raises:
        Refused: it is too long.
        OSError: nothing came.
        ValueError: it is none.
    """
    try:
        body = receive_frame(line, _ANNOUNCEMENT_BYTES, within_s=PATIENCE_S)
    except ChannelError as error:
        raise Refused(str(error)) from error
    announcement: dict[str, Any] = json.loads(body)
    return announcement


def answer(line: socket.socket, refused: str = "") -> None:
    """Say that all is well, or why not.

    Raises:
        OSError: nobody is there.
    """
    told = {"refused": refused[: _ANSWER_BYTES // 8]} if refused else {"taken": True}
    line.sendall(frame(json.dumps(told).encode(), _ANSWER_BYTES))


def await_answer(line: socket.socket) -> None:
    """Return once the holder says that all is well.

    Raises:
        Refused: it does not.
        OSError: it says nothing.
    """
    try:
        told = json.loads(receive_frame(line, _ANSWER_BYTES, within_s=ANSWER_S))
        line.settimeout(PATIENCE_S)
    except (ChannelError, ValueError) as error:
        raise Refused("it answered something else") from error
    if told != {"taken": True}:
        raise Refused(
            str(told.get("refused", told))
            if isinstance(told, dict)
            else "it answered something else"
        )


def read_into(line: socket.socket, target: memoryview) -> None:
    """Fill `target`, however long it takes, as long as something comes.

    Raises:
        OSError: nothing does.
    """
    line.settimeout(PATIENCE_S)
    receive_into(line, target)
