"""Run checks in a separate process, because a driver or a file system may never answer.

`checking FOLDER NAME…` runs the checks in order. After each check, the process prints one JSON line
with the findings. The process ends when its parent ends.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from holdfast.adopt.doctor.findings import Check, Finding, unseen
from holdfast.adopt.doctor.limits import control_groups, shared_memory, ulimits
from holdfast.adopt.doctor.machine import clock, ports, storage
from holdfast.adopt.doctor.schedulers import kubernetes, slurm
from holdfast.adopt.doctor.software import gpus, versions
from holdfast.core.processes import die_with_parent

CHECKS: dict[str, Check] = {
    "versions": versions,
    "gpus": gpus,
    "shared memory": shared_memory,
    "ulimits": ulimits,
    "control groups": control_groups,
    "storage": storage,
    "clock": clock,
    "slurm": slurm,
    "kubernetes": kubernetes,
    "ports": ports,
}
"""The checks by name, in the order in which they run."""


def main() -> None:
    """Run the checks that the command line names."""
    die_with_parent()
    out = os.dup(1)
    os.dup2(2, 1)  # a library that prints must not print between the lines
    folder, *names = sys.argv[1:]
    for name in names:
        findings = [asdict(one) for one in findings_of(CHECKS[name], Path(folder))]
        line = json.dumps(findings).encode() + b"\n"
        while line:
            line = line[os.write(out, line) :]


def findings_of(check: Check, folder: Path) -> Iterator[Finding]:
    """Yield the findings of a check; if the check raises an error, yield the error as a finding."""
    try:
        yield from check(folder)
    except Exception as error:
        yield unseen(f"The check failed: {type(error).__name__}: {error}.")


if __name__ == "__main__":
    main()
