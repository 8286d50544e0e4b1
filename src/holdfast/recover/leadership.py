"""Which supervisor leads a run, where several nodes share the run's folder.

Each supervisor takes a number by creating a file of that name, which one process alone can do. The highest number
leads: agents obey no lower one, and a supervisor that finds a higher one ends, and touches nothing. While a supervisor
lives it touches a file. A node takes over from a supervisor only where that file stays as it is and no connection is
possible, for some time by the node's own clock: a cut between two nodes moves nothing.
"""

import itertools
import time
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast.core.paths import RunPaths

BEAT_S = 2.0
SILENT_S = 20.0
"""A supervisor that has touched its file for so long no more is gone."""
CLAIM_S = 60.0
"""A node that has claimed the lead and has not taken it is passed over after this time."""


class Superseded(HoldfastError):
    """Another supervisor leads the run."""

    def __init__(self) -> None:
        super().__init__(
            "Another node has taken over this run, since this one had no connection for too long. Start `holdfast run` "
            "again to take part as a spare."
        )


def next_generation(paths: RunPaths, node_id: str, after: int | None = None) -> int:
    """Return a number that no supervisor of the run has had; two never get the same.

    Args:
        paths: of the run.
        node_id: the node that keeps the supervisor going.
        after: the number of the supervisor that this one follows on; None: a person has started this one.

    Raises:
        Superseded: another node leads the run by now.
        OSError: the run's folder cannot be used.
    """
    paths.supervisors.mkdir(parents=True, exist_ok=True)
    newest = newest_generation(paths)
    is_ours = newest == 0 or _owner(paths, newest) == node_id
    if after is not None and newest > after and not is_ours:
        raise Superseded
    generation = newest + 1
    while True:
        try:
            with (paths.supervisors / f"{generation:06d}").open("x") as file:
                file.write(f"{node_id}\n")
        except FileExistsError:
            generation += 1
            continue
        except OSError:  # a full disk: training does not end by that
            pass
        return generation


def _owner(paths: RunPaths, generation: int) -> str:
    return (paths.supervisors / f"{generation:06d}").read_text().strip()


def newest_generation(paths: RunPaths) -> int:
    """Return the highest number that a supervisor of the run has; 0 before the first.

    Raises:
        OSError: the run's folder cannot be read.
    """
    try:
        names = [one.name for one in paths.supervisors.iterdir()]
    except FileNotFoundError:
        return 0
    return max((int(name) for name in names if name.isdigit()), default=0)


def beat(paths: RunPaths, generation: int) -> bool:
    """Show that a supervisor lives; return whether it still leads. Storage that fails changes nothing."""
    try:
        if newest_generation(paths) > generation:
            return False
        _beat_of(paths).touch()
    except OSError:
        pass
    return True


def claim(paths: RunPaths, generation: int) -> bool:
    """Return whether this node may take over from a supervisor; of several nodes, one may.

    Raises:
        OSError: the run's folder cannot be written.
    """
    for number in itertools.count():
        path = paths.supervisors / f"{generation:06d}.follower-{number}"
        try:
            path.open("x").close()
        except FileExistsError:
            probe = paths.supervisors / "now"
            probe.touch()  # for the time of the file server
            if probe.stat().st_mtime - path.stat().st_mtime < CLAIM_S:
                return False
        else:
            return True
    raise AssertionError  # there is always another number


class Watch:
    """Watches, from another node, whether a supervisor of the run lives."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._seen: tuple[int, int] | None = None
        """The number of the newest supervisor, and when it has touched its file last."""
        self._since_s = time.monotonic()

    def gone(self) -> int | None:
        """Return the number of the newest supervisor once it has been silent for `SILENT_S`; else None."""
        try:
            seen = newest_generation(self._paths), _beat_of(self._paths).stat().st_mtime_ns
        except OSError:  # without the folder this node cannot lead either
            self._seen = None
            return None
        if seen != self._seen:
            self._seen, self._since_s = seen, time.monotonic()
        return seen[0] if time.monotonic() - self._since_s > SILENT_S else None


def _beat_of(paths: RunPaths) -> Path:
    return paths.supervisors / "beat"
