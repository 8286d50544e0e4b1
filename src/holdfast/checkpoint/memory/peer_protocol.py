"""What a writing process and the one on a peer node that holds its snapshot say to each other, over TCP.

| from the sender | meaning |
|---|---|
| 8 bytes, 32 bytes, 4 bytes | what protocol this is, the holder's token, the length of the next |
| `{"rank", "world_size", "step", "save", "image_bytes", "notes_bytes", "notes"}` | what comes; `notes`: a digest |
| the notes, the files of the image | after the first answer; see `keeping.Snapshot.pack_notes` |

The holder answers with one line, `{"taken": true}` or `{"refused": WHY}`, twice: before anything large is sent, and
once every byte is verified. To whoever does not have the token it says nothing. Nothing here is unpickled.
"""

import json
import socket
import time
from typing import Any, Final

import xxhash

MAGIC: Final = b"HFPEER1\n"
TOKEN_BYTES: Final = 32
HEAD_BYTES: Final = len(MAGIC) + TOKEN_BYTES + 4
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
    data = json.dumps(announcement).encode()
    assert len(data) <= _ANNOUNCEMENT_BYTES, "it has no long fields"
    return MAGIC + token + len(data).to_bytes(4, "big") + data


def read_announcement(line: socket.socket, length: int) -> dict[str, Any]:
    """What a sender, who has shown the token, says that it will send.

    Raises:
        Refused: it is too long.
        OSError: nothing came.
        ValueError: it is none.
    """
    if length > _ANNOUNCEMENT_BYTES:
        raise Refused(f"an announcement of {length:,} bytes")
    announcement: dict[str, Any] = json.loads(read_bytes(line, length, within_s=PATIENCE_S))
    return announcement


def answer(line: socket.socket, refused: str = "") -> None:
    """Say that all is well, or why not.

    Raises:
        OSError: nobody is there.
    """
    told = {"refused": refused[: _ANSWER_BYTES // 8]} if refused else {"taken": True}
    line.sendall(json.dumps(told).encode() + b"\n")


def await_answer(line: socket.socket) -> None:
    """Return once the holder says that all is well.

    Raises:
        Refused: it does not.
        OSError: it says nothing.
    """
    until_s = time.monotonic() + ANSWER_S
    said = b""
    while not said.endswith(b"\n"):
        line.settimeout(max(until_s - time.monotonic(), 1e-3))
        byte = line.recv(1)
        if not byte or len(said) >= _ANSWER_BYTES:
            raise ConnectionResetError("the peer ended the connection")
        said += byte
    line.settimeout(PATIENCE_S)
    try:
        told = json.loads(said)
    except ValueError as error:
        raise Refused("it answered something else") from error
    if told != {"taken": True}:
        raise Refused(
            str(told.get("refused", told))
            if isinstance(told, dict)
            else "it answered something else"
        )


def read_bytes(line: socket.socket, count: int, *, within_s: float) -> bytes:
    """`count` bytes, all of them `within_s`.

    Raises:
        OSError: they did not come.
    """
    until_s = time.monotonic() + within_s
    found = bytearray(count)
    left = memoryview(found)
    while left:
        line.settimeout(max(until_s - time.monotonic(), 1e-3))
        left = left[_received(line, left) :]
    return bytes(found)


def read_into(line: socket.socket, target: memoryview) -> None:
    """Fill `target`, however long it takes, as long as something comes.

    Raises:
        OSError: nothing does.
    """
    line.settimeout(PATIENCE_S)
    while target:
        target = target[_received(line, target) :]


def _received(line: socket.socket, target: memoryview) -> int:
    count = line.recv_into(target)
    if not count:
        raise ConnectionResetError("the peer ended the connection")
    return count
