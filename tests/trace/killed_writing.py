"""Run code that writes telemetry, in a process that kills itself in the middle."""

import signal
import subprocess
import sys
from pathlib import Path

KILLED = """
import os, signal, sys
from holdfast.trace.telemetry import {module}
step = int(sys.argv.pop())
real = {module}.write_parquet
def write_and_die(*arguments):
    global step
    real(*arguments)
    step -= 1
    if step == 0:
        os.kill(os.getpid(), signal.SIGKILL)
{module}.write_parquet = write_and_die
"""


def killed_after_writing(step: int, module: str, code: str, *arguments: Path | str) -> bool:
    """Run code that may use `module` of `holdfast.trace.telemetry`, and kill it after some writes.

    The process receives SIGKILL as soon as the module has written that many Parquet files. Returns
    True if the process was killed.
    """
    command = [
        sys.executable,
        "-c",
        KILLED.format(module=module) + code,
        *map(str, arguments),
        str(step),
    ]
    return subprocess.run(command, check=False).returncode == -signal.SIGKILL
