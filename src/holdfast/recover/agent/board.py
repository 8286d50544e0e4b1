"""Publish the address at which the nodes of a run meet, and the token of the run.

The first node publishes this on a board, and so does each node that takes over the lead; the other
nodes read it. If the run's ledger is a database server, the board is a row of the ledger, so that
the nodes need not share a folder. Otherwise, the board is a file in `$HOLDFAST_HOME`, which the
nodes must share.
"""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.core.errors import HoldfastError
from holdfast.core.paths import is_server

if TYPE_CHECKING:
    from holdfast.core.ledger import Ledger


class Board(Protocol):
    """A place where the leading node publishes the addresses and the token of the run."""

    place: str
    """The name of the board in messages to people."""

    def publish(self, fields: Mapping[str, Any]) -> None:
        """Publish `hosts`, `port`, `token` and `run_id`, and so replace an earlier publication.

        Raises:
            OSError, LedgerError: the board cannot be written.
        """

    def read(self) -> dict[str, Any] | None:
        """Return the published fields; None if there are none, or if the board cannot be read."""

    def remove(self) -> None:
        """Withdraw the publication."""


class FolderBoard:
    """A board in a file in `$HOLDFAST_HOME/rendezvous`, which only the user can read."""

    def __init__(self, home: Path, key: str) -> None:
        self.path = home / "rendezvous" / f"{key}.json"
        self.place = str(self.path)

    def publish(self, fields: Mapping[str, Any]) -> None:
        """See `Board`."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = self.path.with_suffix(f".{secrets.token_hex(4)}")
        new.touch(0o600)
        new.write_text(json.dumps(dict(fields)))
        new.replace(self.path)

    def read(self) -> dict[str, Any] | None:
        """See `Board`."""
        try:
            return _credentials(json.loads(self.path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remove(self) -> None:
        """See `Board`."""
        self.path.unlink(missing_ok=True)


class LedgerBoard:
    """A board in a row of a ledger on a database server.

    Anyone who can read the row can command the nodes of the run, since it contains the token. Each
    call opens a connection and closes it again, because every agent has a board, and a server
    allows only a few connections.
    """

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._key = key
        self.place = f"the row {key} of the ledger"

    def publish(self, fields: Mapping[str, Any]) -> None:
        """See `Board`."""
        from holdfast.core.ledger import MeetingPlace

        with self._opened() as ledger:
            ledger.publish_meeting(MeetingPlace(key=self._key, **fields))

    def read(self) -> dict[str, Any] | None:
        """See `Board`."""
        try:
            with self._opened() as ledger:
                found = ledger.meeting(self._key)
        except HoldfastError:
            return None
        return None if found is None else _credentials(vars(found))

    def remove(self) -> None:
        """See `Board`."""
        try:
            with self._opened() as ledger:
                ledger.remove_meeting(self._key)
        except HoldfastError:
            return  # the token of an ended run is useless

    def _opened(self) -> "Ledger":
        from holdfast.core.ledger import Ledger  # most agents need no database

        return Ledger.open(self._url)


def board_of(home: Path, key: str, url: str | None) -> Board:
    """Return the board of a run: in the ledger at `url` if it is on a server, else in `home`."""
    return LedgerBoard(url, key) if url and is_server(url) else FolderBoard(home, key)


def _credentials(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "hosts": [str(host) for host in fields["hosts"]],
        "port": int(fields["port"]),
        "token": str(fields["token"]),
        "run_id": str(fields["run_id"]),
    }
