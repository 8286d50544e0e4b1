"""Call a function of this package in a process with a fresh folder; the answer is JSON.

The process lives on until it is killed, so a hang at its exit cannot delay the benchmark. A quick
run forks this process in place of starting an interpreter (`forked`).
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from checkpointing.forked import Forks, forked
from common.jobs import DoesNotWork, job, last_words, wait_until

BENCHMARKS = Path(__file__).parents[1]
TIMEOUT_S = 1800.0
FORKED: tuple[str, ...] = ()
"""The launcher that forks this process."""


@dataclass(frozen=True, kw_only=True)
class Child:
    """A process that runs a function."""

    process: subprocess.Popen[bytes] | Forks
    folder: Path
    result: Path
    timeout_s: float

    def answer(self) -> Any:
        """Return the result of the function.

        Raises:
            DoesNotWork: the function failed or timed out; the message has the reason.
        """
        over = wait_until(
            lambda: self.result.exists() or self.process.poll() is not None,
            timeout_s=self.timeout_s,
        )
        if not over:
            raise DoesNotWork(f"not over within {self.timeout_s:.0f} s")
        if not self.result.exists():
            raise DoesNotWork(f"exit code {self.process.returncode}: {last_words(self.folder, 1)}")
        answer = json.loads(self.result.read_text())
        if answer["error"] is not None:
            raise DoesNotWork(answer["error"])
        return answer["answer"]

    def kill(self) -> None:
        """Kill this process, but none of those that it started."""
        self.process.kill()
        self.process.wait()


@contextmanager
def child(
    function: Callable[..., Any],
    place: Path,
    /,
    *,
    launcher: Sequence[str] = (sys.executable,),
    ranks: int = 0,
    timeout_s: float = TIMEOUT_S,
    **arguments: Any,
) -> Iterator[Child]:
    """Call `function(**arguments)` in a process, and kill all its processes in the end.

    The arguments must be JSON values. Without a launcher (`FORKED`), so many `ranks` of one group
    call the function, or one process without a group.
    """
    place.mkdir(parents=True, exist_ok=True)
    result = place / f"{function.__name__}.json"
    path = os.pathsep.join(filter(None, (str(BENCHMARKS), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": path, "TMPDIR": str(place)}
    if not launcher:
        call = partial(_call, function, arguments, result)
        with forked(call, place, environment, ranks=ranks) as processes:
            yield Child(process=processes, folder=place, result=result, timeout_s=timeout_s)
        return
    words = (
        *launcher,
        "-m",
        __name__,
        function.__module__,
        function.__name__,
        json.dumps(arguments),
        str(result),
    )
    with job(words, place, environment=environment) as process:
        yield Child(process=process, folder=place, result=result, timeout_s=timeout_s)


def in_child(function: Callable[..., Any], place: Path, /, **options: Any) -> Any:
    """Return the answer of `function`; the options are those of `child`.

    Raises:
        DoesNotWork: as in `Child.answer`.
    """
    with child(function, place, **options) as started:
        return started.answer()


def main() -> None:
    """Call the function that the command line names; the first rank answers."""
    module, name, arguments, result = sys.argv[1:]

    def imported(**given: Any) -> Any:
        # Here, so that the answer has the reason if the import fails.
        return getattr(importlib.import_module(module), name)(**given)

    _call(imported, json.loads(arguments), Path(result))


def _call(function: Callable[..., Any], arguments: Mapping[str, Any], result: Path) -> None:
    """Call a function, write its answer where this is the first rank, and wait to be killed."""
    answer, error = None, None
    try:
        answer = function(**arguments)
    except Exception as failed:
        traceback.print_exc()
        kind = "" if isinstance(failed, DoesNotWork) else f"{type(failed).__name__}: "
        error = f"{kind}{failed}".partition("\n")[0]
    if os.environ.get("RANK", "0") == "0":
        unfinished = Path(f"{result}.unfinished")
        unfinished.write_text(json.dumps({"answer": answer, "error": error}))
        unfinished.rename(result)
    elif error is not None:
        sys.exit(1)
    signal.pause()


if __name__ == "__main__":
    main()
