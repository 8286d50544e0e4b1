"""The lead of a run of several nodes: one supervisor leads.

Each supervisor takes a number that no other one gets. The highest number leads: agents obey no
lower one, and a supervisor that finds a higher one ends and changes nothing. A living supervisor
beats. A node takes over from a supervisor only if, for some time by the node's own clock, the
supervisor has not beaten and no connection was possible. So the lead stays where it is if the
connection between two nodes is cut, or if the authority cannot be reached.

Two authorities give the numbers. The run's ledger decides between them:

- `SharedFolder`, if the ledger is a file: the folder of the runs, which all nodes share. A
  supervisor takes a number by creating a file of that name, which only one process can do.
- `SharedLedger`, if the ledger is a PostgreSQL. A supervisor takes a number by changing a row that
  has not changed since its reading. The nodes need not share a folder.
"""

import contextlib
import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Lead, Ledger
from holdfast.core.paths import RunPaths, is_server

BEAT_S = 2.0
SILENT_S = 20.0
"""Seconds without a beat after which a supervisor counts as gone."""
CLAIM_S = 60.0
"""Seconds after which a node's claim to the lead in a folder expires, if it has not led since."""


class Superseded(HoldfastError):
    """Another supervisor leads the run."""

    def __init__(self) -> None:
        super().__init__(
            "Another node has taken over this run, since this one had no connection for too long. Start `holdfast run` "
            "again to take part as a spare."
        )


class HandedOver(Superseded):
    """The supervisor has handed the lead over to another node, since its own pod ends."""


Sign = tuple[int, int]
"""The number of the newest supervisor, and a value that changes while that supervisor lives."""


class Leadership(Protocol):
    """The lead of one run."""

    def take(self, node_id: str, after: int | None) -> int:
        """Return a new number, which no other supervisor of the run gets.

        Args:
            node_id: the node that keeps the supervisor going.
            after: the number that this node had or has claimed last; None: a person has started
                the supervisor.

        Raises:
            Superseded: another node leads the run by now.
            OSError, LedgerError: the authority cannot be used.
        """

    def beat(self, generation: int) -> bool:
        """Record a sign of life of a supervisor; return False if the supervisor leads no more.

        While the authority does not answer, the supervisor keeps the lead.
        """

    def sign(self) -> Sign:
        """Return the newest sign of life.

        Raises:
            OSError, LedgerError: the authority cannot be read.
        """

    def claim(self, sign: Sign, node_id: str) -> int | None:
        """Return the number after which this node may lead; None if this node may not lead.

        Args:
            sign: the last sign of life of the supervisor.
            node_id: this node.

        Raises:
            OSError, LedgerError: the authority cannot be written.
        """


class SharedFolder:
    """The lead by files in the run's folder."""

    def __init__(self, paths: RunPaths) -> None:
        self._folder = paths.supervisors
        self._unrecorded: str | None = None
        """The node that leads by a number whose file could not be created yet."""

    def take(self, node_id: str, after: int | None) -> int:
        """See `Leadership`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        newest = self._newest()
        is_ours = newest == 0 or self._owner(newest) == node_id
        if after is not None and newest > after and not is_ours:
            raise Superseded
        # This node's last number may have no file, see `_record`.
        generation = max(newest, after or 0) + 1
        while not self._record(generation, node_id):
            generation += 1
        return generation

    def _record(self, generation: int, node_id: str) -> bool:
        """Create the file of a number; return False if another supervisor has the number.

        A full disk must not end a training: `beat` creates the missing file of a leader later.
        """
        self._unrecorded = None
        try:
            with (self._folder / f"{generation:06d}").open("x") as file:
                file.write(f"{node_id}\n")
        except FileExistsError:
            return False
        except OSError:
            if not (self._folder / f"{generation:06d}").exists():
                self._unrecorded = node_id
        return True

    def beat(self, generation: int) -> bool:
        """See `Leadership`."""
        try:
            if self._newest() > generation:
                return False
            if self._unrecorded is not None and not self._record(generation, self._unrecorded):
                return False
            self._beat_file.touch()
        except OSError:
            pass
        return True

    def sign(self) -> Sign:
        """See `Leadership`."""
        return self._newest(), self._beat_file.stat().st_mtime_ns

    def claim(self, sign: Sign, node_id: str) -> int | None:
        """See `Leadership`."""
        generation, _ = sign
        for number in itertools.count():
            path = self._folder / f"{generation:06d}.follower-{number}"
            try:
                with path.open("x") as file:
                    file.write(f"{node_id}\n")
            except FileExistsError:
                probe = self._folder / "now"
                probe.touch()  # for the time of the file server
                if probe.stat().st_mtime - path.stat().st_mtime < CLAIM_S:
                    return None
            else:
                return generation
        raise AssertionError  # there is always another number

    def _newest(self) -> int:
        """Return the highest number that a supervisor of the run has; 0 before the first."""
        try:
            names = [one.name for one in self._folder.iterdir()]
        except FileNotFoundError:
            return 0
        return max((int(name) for name in names if name.isdigit()), default=0)

    def _owner(self, generation: int) -> str:
        return (self._folder / f"{generation:06d}").read_text().strip()

    @property
    def _beat_file(self) -> Path:
        return self._folder / "beat"


class SharedLedger:
    """The lead by a row of a ledger that is a server."""

    def __init__(self, opened: Callable[[], AbstractContextManager[Ledger]], run_id: str) -> None:
        """Open the ledger by `opened` for each use; `opened` raises LedgerError on failure."""
        self._opened = opened
        self._run_id = run_id

    def take(self, node_id: str, after: int | None) -> int:
        """See `Leadership`."""
        while True:
            with self._opened() as ledger:
                before = ledger.lead(self._run_id)
                is_ours = before.generation == 0 or before.node_id == node_id
                if after is not None and before.generation > after and not is_ours:
                    raise Superseded
                taken = ledger.take_lead(before, node_id)
            if taken is not None:
                return taken.generation
            # The last supervisor has beaten meanwhile, or another node was first.

    def beat(self, generation: int) -> bool:
        """See `Leadership`."""
        try:
            with self._opened() as ledger:
                return ledger.beat(self._run_id, generation)
        except HoldfastError:
            return True

    def sign(self) -> Sign:
        """See `Leadership`."""
        with self._opened() as ledger:
            lead = ledger.lead(self._run_id)
        return lead.generation, lead.beats

    def claim(self, sign: Sign, node_id: str) -> int | None:
        """See `Leadership`.

        In the ledger, the claim itself takes the next supervisor's number. If this node then never
        leads, another node can take over from it in the same way.
        """
        generation, beats = sign
        seen = Lead(run_id=self._run_id, generation=generation, node_id="", beats=beats)
        with self._opened() as ledger:
            taken = ledger.take_lead(seen, node_id)
        return None if taken is None else taken.generation


def leadership_of(url: str, paths: RunPaths, ledger: Ledger | None = None) -> Leadership:
    """Return the authority of a run.

    Args:
        url: the URL of the ledger.
        paths: the paths of the run.
        ledger: the open ledger. None: the ledger is opened for each use and closed afterwards,
            since all nodes of a run may watch at once, and a server has few connections.
    """
    if not is_server(url):
        return SharedFolder(paths)

    def opened() -> AbstractContextManager[Ledger]:
        return Ledger.open(url) if ledger is None else contextlib.nullcontext(ledger)

    return SharedLedger(opened, paths.run_id)


class Watch:
    """A watch, from another node, over the signs of life of the run's supervisor."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._seen: Sign | None = None
        self._since_s = time.monotonic()

    def gone(self, *, is_successor: bool = False) -> Sign | None:
        """Return the last sign of life if it is older than `SILENT_S`; else None.

        Args:
            is_successor: True if the supervisor has handed the lead over to this node: then the age
                does not matter.
        """
        try:
            seen = self._leadership.sign()
        except (OSError, HoldfastError):  # without the authority this node cannot lead either
            self._seen = None
            return None
        if seen != self._seen:
            self._seen, self._since_s = seen, time.monotonic()
        is_old = time.monotonic() - self._since_s > SILENT_S
        return seen if is_old or is_successor else None
