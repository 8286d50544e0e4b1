"""Record the checkpoint room's events in this process, and the bytes read from disk."""

from collections.abc import Mapping
from typing import Any

import psutil

from common.jobs import DoesNotWork
from holdfast.core.link import Unsupervised, set_job_link


class Heard(Unsupervised):
    """A link that keeps every event."""

    def __init__(self) -> None:
        self._events: list[tuple[str, dict[str, Any]]] = []
        set_job_link(self)

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Keep the event."""
        self._events.append((kind, dict(data)))

    def demand_tier(self, tier: str) -> None:
        """Check that the last restore read from `tier`, "memory" or "disk".

        Raises:
            DoesNotWork: the restore read from elsewhere.
        """
        found = [data.get("tier") for kind, data in self._events if kind == "restored"]
        if found[-1:] != [tier]:
            raise DoesNotWork(
                f"restored from {found[-1] if found else 'nothing'} instead of {tier}"
            )


def read_so_far() -> tuple[int, int]:
    """Return the bytes read from disk, and the bytes requested by read calls.

    Both count this process and its running children. Requested bytes may come from the page cache.
    """
    own = psutil.Process()
    counters = [process.io_counters() for process in (own, *own.children(recursive=True))]
    return sum(one.read_bytes for one in counters), sum(one.read_chars for one in counters)
