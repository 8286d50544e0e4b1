"""The page Cluster: the trace report of the ledger, made again after the ledger has changed.

A report reads every run and takes seconds to minutes. So a page shows the newest report, states the
report's time, and starts the next report if the ledger has changed since. The browsers receive an
event once the next report is there.
"""

import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import HoldfastError, LedgerError
from holdfast.ui.console.backend import Backend, ClusterReport
from holdfast.ui.console.queries import changes
from holdfast.ui.console.queries.changes import Position
from holdfast.ui.console.queries.paging import LIMIT_S

REST_S = 30.0
"""The least seconds from one report to the next."""
REST_SHARE = 4.0
"""The least rest after a report, in times of the report's own time: a fifth of one core at most."""
TARGET = "cluster"


@dataclass(frozen=True, kw_only=True)
class _Made:
    """One attempt to make the report."""

    position: Position
    """The position of the ledger before the report was made."""
    report: ClusterReport | None
    at_s: float | None
    """The time of the report, in Unix seconds."""
    trouble: str
    """The reason why the newest attempt has failed; empty after a success."""


class ClusterPages:
    """The newest trace report of one ledger. Any thread may use it."""

    def __init__(
        self, backend: Backend, announce: Callable[[str], None], *, rest_s: float = REST_S
    ) -> None:
        """Begin without a report.

        Args:
            backend: the ledger, and the function that makes a report.
            announce: receives `TARGET` whenever a report was made or could not be made.
            rest_s: the least seconds from one report to the next.
        """
        self._backend = backend
        self._announce = announce
        self._rest_s = rest_s
        self._made: _Made | None = None
        self._is_making = False
        self._next_at_s = 0.0
        """The earliest time of the next report, in monotonic seconds."""
        self._lock = threading.Lock()

    def page(self) -> dict[str, Any]:
        """Return the newest report, and start the next report if the ledger has changed since.

        Raises:
            HoldfastError: the ledger cannot be read.
        """
        position = self._position()
        with self._lock:
            made = self._made
            is_current = made is not None and made.position == position
            if not is_current and not self._is_making:
                self._is_making = True
                threading.Thread(target=self._make, name="cluster-report", daemon=True).start()
        report = None if made is None else made.report
        return {
            "report": None if report is None else dict(report.findings),
            "files": [] if report is None else sorted(report.files),
            "made_at_s": None if made is None else made.at_s,
            "trouble": "" if made is None else made.trouble,
            "is_current": is_current,
        }

    def file(self, name: str) -> bytes | None:
        """Return a file of the newest report; None if the report has no such file."""
        made = self._made
        return None if made is None or made.report is None else made.report.files.get(name)

    def _position(self) -> Position:
        with self._backend.ledger.bounded_reading(LIMIT_S) as connection:
            return changes.newest(connection)

    def _make(self) -> None:
        try:
            time.sleep(max(0.0, self._next_at_s - time.monotonic()))
            began_s = time.monotonic()
            with contextlib.suppress(LedgerError):  # the pages report an unavailable ledger
                self._made = self._next()
            took_s = time.monotonic() - began_s
            self._next_at_s = time.monotonic() + max(self._rest_s, REST_SHARE * took_s)
        finally:
            with self._lock:
                self._is_making = False
        self._announce(TARGET)

    def _next(self) -> _Made:
        """Return the next report; if none can be made, the one before and the reason.

        Raises:
            LedgerError: the ledger cannot be read.
        """
        position, at_s, trouble = self._position(), time.time(), ""
        before = self._made
        report = None if before is None else before.report
        made_at_s = None if before is None else before.at_s
        try:
            report, made_at_s = self._backend.cluster_report(), at_s
        except HoldfastError as error:
            trouble = str(error)
        except Exception as error:  # the page must not wait forever for this report
            traceback.print_exc()
            trouble = f"Holdfast itself failed: {error!r}"
        return _Made(position=position, report=report, at_s=made_at_s, trouble=trouble)
