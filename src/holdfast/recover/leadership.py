"""Make sure that only one supervisor leads a run of several nodes.

Each supervisor takes a number, its generation, which no other supervisor gets. The supervisor with
the highest number leads: agents ignore orders from a lower number, and a supervisor that finds a
higher number ends without changing anything. A living supervisor regularly records a sign of life,
called a beat. A node takes over from a supervisor only if, for some time by the node's own clock,
there was no beat and no connection to the supervisor. So the lead does not move just because the
connection between two nodes is cut, or because the authority cannot be reached.

An authority assigns the numbers. There are two; the run's ledger determines which one is used:

- `SharedFolder`, if the ledger is a file: the run's folder, which all nodes share. A supervisor
  takes a number by creating a file with this name, which only one process can do.
- `SharedLedger`, if the ledger is a PostgreSQL database. A supervisor takes a number by changing a
  row, provided that the row has not changed since it was read. The nodes need not share a folder.
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
"""A supervisor counts as gone after this number of seconds without a beat."""
CLAIM_S = 60.0
"""A node's claim to the lead in a folder expires after this number of seconds, if the node has not
led since then.
"""


class Superseded(HoldfastError):
    """Another supervisor leads the run."""

    def __init__(self) -> None:
        super().__init__(
            "Another node leads this run now, since this node had no connection for too long. Start `holdfast run` "
            "again to take part as a spare."
        )


class HandedOver(Superseded):
    """The supervisor has handed the lead over to another node, because its own pod ends."""


Sign = tuple[int, int]
"""A sign of life: the number of the newest supervisor, and a value that changes while it lives."""


class Leadership(Protocol):
    """The authority over the lead of one run."""

    def take(self, node_id: str, after: int | None) -> int:
        """Take a new number, which no other supervisor of the run gets, and return it.

        Args:
            node_id: the id of the node on which the supervisor runs.
            after: the number that this node last had or claimed; None if a person has started the
                supervisor.

        Raises:
            Superseded: another node leads the run now.
            OSError, LedgerError: the authority cannot be used.
        """

    def beat(self, generation: int) -> bool:
        """Record a sign of life of a supervisor; return False if it does not lead any more.

        While the authority does not answer, the supervisor keeps the lead.
        """

    def sign(self) -> Sign:
        """Return the newest sign of life.

        Raises:
            OSError, LedgerError: the authority cannot be read.
        """

    def claim(self, sign: Sign, node_id: str) -> int | None:
        """Claim the lead for this node.

        Args:
            sign: the last sign of life of the supervisor.
            node_id: the id of this node.

        Returns:
            The number after which this node may take the next one (see `take`); None if this node
            may not lead.

        Raises:
            OSError, LedgerError: the authority cannot be written.
        """


class SharedFolder:
    """The authority by files in the run's folder."""

    def __init__(self, paths: RunPaths) -> None:
        self._folder = paths.supervisors
        self._unrecorded: str | None = None
        """The node that leads with a number whose file could not be created yet."""

    def take(self, node_id: str, after: int | None) -> int:
        """See `Leadership`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        newest = self._newest()
        is_ours = newest == 0 or self._owner(newest) == node_id
        if after is not None and newest > after and not is_ours:
            raise Superseded
        # The last number of this node may have no file (see `_record`).
        generation = max(newest, after or 0) + 1
        while not self._record(generation, node_id):
            generation += 1
        return generation

    def _record(self, generation: int, node_id: str) -> bool:
        """Create the file for a number; return False if another supervisor has the number.

        A full disk must not end a training. So a failure to write is ignored, and `beat` creates
        the missing file later.
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
                probe.touch()  # to read the clock of the file server
                if probe.stat().st_mtime - path.stat().st_mtime < CLAIM_S:
                    return None
            else:
                return generation
        raise AssertionError  # unreachable: the loop has no end

    def _newest(self) -> int:
        """Return the highest number of any supervisor of the run; 0 if there was none."""
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
    """The authority by a row in a ledger on a database server."""

    def __init__(self, opened: Callable[[], AbstractContextManager[Ledger]], run_id: str) -> None:
        """Store `opened`, which opens the ledger for each use, and raises LedgerError on failure."""
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
            # Try again: the last supervisor has recorded a beat, or another node was faster.

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

        In the ledger, a claim already takes the number of the next supervisor. If this node then
        never leads, another node can take over from it in the same way.
        """
        generation, beats = sign
        seen = Lead(run_id=self._run_id, generation=generation, node_id="", beats=beats)
        with self._opened() as ledger:
            taken = ledger.take_lead(seen, node_id)
        return None if taken is None else taken.generation


def leadership_of(url: str, paths: RunPaths, ledger: Ledger | None = None) -> Leadership:
    """Return the authority over the lead of a run.

    Args:
        url: the URL of the ledger.
        paths: the paths of the run.
        ledger: the open ledger; None to open the ledger for each use and close it afterwards. This
            is useful because all nodes of a run may watch at the same time, and a server allows
            only a few connections.
    """
    if not is_server(url):
        return SharedFolder(paths)

    def opened() -> AbstractContextManager[Ledger]:
        return Ledger.open(url) if ledger is None else contextlib.nullcontext(ledger)

    return SharedLedger(opened, paths.run_id)


class LeaderWatch:
    """Watch the signs of life of the run's supervisor from another node."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._seen: Sign | None = None
        self._since_s = time.monotonic()

    def gone(self, *, is_successor: bool = False) -> Sign | None:
        """Return the last sign of life if it is older than `SILENT_S`; else None.

        Args:
            is_successor: True if the supervisor has handed the lead over to this node, in which
                case the age of the sign does not matter.
        """
        try:
            seen = self._leadership.sign()
        except (OSError, HoldfastError):  # without the authority, this node could not lead, either
            self._seen = None
            return None
        if seen != self._seen:
            self._seen, self._since_s = seen, time.monotonic()
        is_old = time.monotonic() - self._since_s > SILENT_S
        return seen if is_old or is_successor else None
