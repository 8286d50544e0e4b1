"""Run a command to its end; measure its wall time and its peak memory."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.jobs import DoesNotWork


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run of a command."""

    wall_s: float
    rss_mib: float
    """The peak memory (RSS) of the largest process."""
    output: str


def measure(
    command: Sequence[str], folder: Path, *, environment: Mapping[str, str] | None = None
) -> Measured:
    """Run `command` in `folder`.

    Raises:
        DoesNotWork: the command failed; the message has the end of its output.
    """
    output, errors = folder / "stdout.txt", folder / "stderr.txt"
    with output.open("wb") as out, errors.open("wb") as err:
        began_s = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, **(environment or {})},
        )
        try:
            # wait4 returns the resources of this child and of the children that it waited for.
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        wall_s = time.perf_counter() - began_s
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise DoesNotWork(
            f"{' '.join(command)} left with {process.returncode}:\n{errors.read_text()[-2000:]}"
        )
    return Measured(wall_s=wall_s, rss_mib=used.ru_maxrss / 1024, output=output.read_text())
