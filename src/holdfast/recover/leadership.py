"""Which supervisor leads a run of several nodes.

Each supervisor takes a number that no other one gets. The highest number leads: agents obey no lower one, and a
supervisor that finds a higher one ends, and touches nothing. While a supervisor lives it beats. A node takes over from
a supervisor only where that has beaten no more and no connection is possible, for some time by the node's own clock: a
cut between two nodes moves nothing, and neither does an authority that cannot be reached.

Two authorities give the numbers. A run has one of them, by its ledger:

- `SharedFolder`: the folder of the runs, which all nodes share, where the ledger is a file. A number is taken by
  creating a file of that name, which one process alone can do.
- `SharedLedger`: a PostgreSQL. A number is taken by changing a row that is as it was when it was read. The nodes need
  not share a folder.
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
"""A supervisor that has beaten no more for so long is gone."""
CLAIM_S = 60.0
"""A node that has claimed the lead in a folder and has not taken it is passed over after this time."""


class Superseded(HoldfastError):
    """Another supervisor leads the run."""

    def __init__(self) -> None:
        super().__init__(
            "Another node has taken over this run, since this one had no connection for too long. Start `holdfast run` "
            "again to take part as a spare."
        )


Sign = tuple[int, int]
"""The number of the newest supervisor, and a sign of life that changes while it lives."""


class Leadership(Protocol):
    """The lead of one run."""

    def take(self, node_id: str, after: int | None) -> int:
        """Return a number that no supervisor of the run has had; two never get the same.

        Args:
            node_id: the node that keeps the supervisor going.
            after: the number that this node had or has claimed last; None: a person has started the supervisor.

        Raises:
            Superseded: another node leads the run by now.
            OSError, LedgerError: the authority cannot be used.
        """

    def beat(self, generation: int) -> bool:
        """Show that a supervisor lives; return whether it still leads. An authority that fails changes nothing."""

    def sign(self) -> Sign:
        """Return the newest sign of life.

        Raises:
            OSError, LedgerError: the authority cannot be read.
        """

    def claim(self, sign: Sign, node_id: str) -> int | None:
        """Return the number after which this node may lead, given the last sign of life; None where it may not.

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
        # The number that this node had last may have no file, see `_record`.
        generation = max(newest, after or 0) + 1
        while not self._record(generation, node_id):
            generation += 1
        return generation

    def _record(self, generation: int, node_id: str) -> bool:
        """Create the file of a number; return False where another supervisor has the number.

        A disk that is full ends no training: the supervisor leads, and `beat` creates the file later.
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
        """Enter what `opened` returns for each use; `opened` raises LedgerError while there is no ledger."""
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
            # The last one has beaten meanwhile, or another node was first.

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
        """See `Leadership`. The number is this node's with the claim: who does not use it is passed over in turn."""
        generation, beats = sign
        seen = Lead(run_id=self._run_id, generation=generation, node_id="", beats=beats)
        with self._opened() as ledger:
            taken = ledger.take_lead(seen, node_id)
        return None if taken is None else taken.generation


def leadership_of(url: str, paths: RunPaths, ledger: Ledger | None = None) -> Leadership:
    """Return the authority of a run.

    Args:
        url: of the ledger.
        paths: of the run.
        ledger: the ledger, where it is open. Else it is opened for each use and closed after it: all nodes of a run may
            watch at once, and a server has few connections.
    """
    if not is_server(url):
        return SharedFolder(paths)

    def opened() -> AbstractContextManager[Ledger]:
        return Ledger.open(url) if ledger is None else contextlib.nullcontext(ledger)

    return SharedLedger(opened, paths.run_id)


class Watch:
    """Watches, from another node, whether a supervisor of the run lives."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._seen: Sign | None = None
        self._since_s = time.monotonic()

    def gone(self) -> Sign | None:
        """Return the last sign of life once there was no other one for `SILENT_S`; else None."""
        try:
            seen = self._leadership.sign()
        except (OSError, HoldfastError):  # without the authority this node cannot lead either
            self._seen = None
            return None
        if seen != self._seen:
            self._seen, self._since_s = seen, time.monotonic()
        return seen if time.monotonic() - self._since_s > SILENT_S else None
