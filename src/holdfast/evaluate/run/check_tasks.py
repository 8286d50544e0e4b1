"""Check on this machine that a suite's tasks exist, before nodes are requested.

A separate process (`python -m holdfast.evaluate.run.check_tasks`) imports the harnesses, so that
the command starts fast. The process reads a suite. If the suite cannot run, the process writes the
reason; otherwise it writes nothing.
"""

import asyncio
import os
import sys
import traceback
from asyncio.subprocess import PIPE
from pathlib import Path

import msgspec

from holdfast.core.child_process import answer_of
from holdfast.core.errors import BadUse
from holdfast.core.processes import die_with_parent, end_without_collecting
from holdfast.evaluate.harness.choose import harness
from holdfast.evaluate.types.suite import Suite


async def check_tasks(suite: Suite, log: Path) -> None:
    """Check that the harness of each entry has the task and may run it.

    The check also passes if this machine lacks a package of the harness. The nodes may have the
    package; if not, they report the error.

    Args:
        suite: the suite to run.
        log: the file for the output of the harnesses, and for errors that concern only this
            machine.

    Raises:
        BadUse: a task does not exist (the message suggests similar names), or needs a feature that
            Holdfast lacks.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as printed:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "holdfast.evaluate.run.check_tasks",
            stdin=PIPE,
            stdout=PIPE,
            stderr=printed,
        )
        output, _ = await answer_of(process, msgspec.json.encode(suite))
    if output:
        raise BadUse(output.decode())


def main() -> None:
    """Read a suite from standard input; if it cannot run, write the reason to standard output."""
    die_with_parent()
    end_without_collecting()
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # harnesses print to standard output
    suite = msgspec.json.decode(sys.stdin.buffer.read(), type=Suite)
    for name in dict.fromkeys(entry.harness for entry in suite.entries):
        try:
            harness(
                name,
                include_paths=suite.include_paths,
                confirm_unsafe_code=suite.confirm_unsafe_code,
            ).prepare([entry for entry in suite.entries if entry.harness == name])
        except Exception as error:
            if _is_of_the_suite(error):
                os.write(answer, str(error).encode())
                return
            traceback.print_exc()


def _is_of_the_suite(error: BaseException) -> bool:
    """Return True if the suite itself is wrong, so that it would fail on every machine.

    The suite is taken to be wrong if the error and all its causes are `BadUse`. Any other error
    may come from this machine alone.
    """
    found: BaseException | None = error
    while found is not None:
        if not isinstance(found, BadUse):
            return False
        found = found.__cause__ or found.__context__
    return True


if __name__ == "__main__":
    main()
