"""Whether a suite's tasks are there, found out on this machine before nodes of others are had.

In: a suite. Out: nothing, or why it cannot be run. Harnesses are imported by a process that ends with the question
(`python -m holdfast.evaluate.run.check_tasks`), so that the command stays light.
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
    """See that every entry's harness knows its task and may run it.

    Where this machine lacks what a harness needs, nothing is said: the nodes may have it, and say so if not.

    Args:
        suite: what is to be run.
        log: gets what harnesses print, and what was in the way here.

    Raises:
        BadUse: a task is not there (with the nearest names), or needs what Holdfast does not give.
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
        said, _ = await answer_of(process, msgspec.json.encode(suite))
    if said:
        raise BadUse(said.decode())


def main() -> None:
    """Read a suite from standard input; write to standard output why it cannot be run, if so."""
    die_with_parent()
    end_without_collecting()
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # harnesses print
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
    """Whether it is our own word on the suite; with another's error behind it, it may be of this machine alone."""
    found: BaseException | None = error
    while found is not None:
        if not isinstance(found, BadUse):
            return False
        found = found.__cause__ or found.__context__
    return True


if __name__ == "__main__":
    main()
