"""Run the tests of one node that need torch: the matrix product and group tests.

`python -m holdfast.recover.localise.worker PARENT_PID` imports torch once and prints a line. Then
it reads orders from standard input, one JSON object per line, and prints one answer per line. Each
order is carried out in a fork, which is killed at a time limit. So a failed test does not disturb
the next one, and no test waits for imports. The process itself starts no threads and opens no GPU,
so that forking is safe.
"""

import contextlib
import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

from holdfast.core.processes import die_with_parent
from holdfast.recover.localise import group, solo

PRODUCT = "matrix product"


def main() -> None:
    """Serve orders until standard input ends."""
    die_with_parent(int(sys.argv[1]))
    answers = _own_output()
    with contextlib.suppress(ImportError):  # a missing torch is reported in the answers
        import torch.distributed  # noqa: F401 - for the forks
    os.write(answers, solo.READY)
    for line in sys.stdin:
        os.write(answers, json.dumps(_in_a_fork(json.loads(line))).encode() + b"\n")


def _own_output() -> int:
    """Return a copy of standard output for answers, and discard everything else that is printed.

    This is necessary because NCCL and other libraries print to standard output.
    """
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return answers


def _in_a_fork(order: dict[str, Any]) -> dict[str, Any]:
    """Carry out one order in a fork; return the answer, or the reason why there is none."""
    reads, writes = os.pipe()
    own = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(own)
            os.close(reads)
            nowhere = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nowhere, 0)  # the test must not read the next orders
            os.write(writes, json.dumps(_carried_out(order)).encode())
        finally:
            os._exit(0)
    os.close(writes)
    limit_s = float(order["limit_s"])
    ready, _, _ = select.select([reads], [], [], limit_s)
    output = os.read(reads, select.PIPE_BUF) if ready else b""
    os.close(reads)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if output:
        answer: dict[str, Any] = json.loads(output)
        return answer
    if not ready:
        return {"error": f"no answer within {limit_s:g} s", "is_slow": True}
    code = os.waitstatus_to_exitcode(status)
    return {"error": f"the test ended with code {code} and no result"}


def _carried_out(order: dict[str, Any]) -> dict[str, Any]:
    if order["what"] == PRODUCT:
        return solo.checked(PRODUCT, solo.matrix_product, Path()).to_json()
    return vars(group.tested(group.GroupOrder.from_json(order)))


if __name__ == "__main__":
    main()
