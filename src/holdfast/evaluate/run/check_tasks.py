"""Check on this machine that a suite's tasks exist, before nodes are requested.

A separate process (`python -m holdfast.evaluate.run.check_tasks`) imports the harnesses, so that
the command stays light. The process reads a suite and writes nothing, or the reason why the suite
cannot run.
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
    """Check that each entry's harness has the task and may run it.

    The check passes silently if this machine lacks a package of the harness: the nodes may have the
    package, and report an error themselves if not.

    Args:
        suite: the suite to run.
        log: the file for the output of the harnesses and for errors of this machine.

    Raises:
        BadUse: a task does not exist (with the nearest names), or needs a feature that Holdfast
            lacks.
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
    """Read a suite from standard input; write the reason to standard output if it cannot run."""
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
    """Return True if all causes are `BadUse`; other causes may concern this machine alone."""
    found: BaseException | None = error
    while found is not None:
        if not isinstance(found, BadUse):
            return False
        found = found.__cause__ or found.__context__
    return True


if __name__ == "__main__":
    main()
