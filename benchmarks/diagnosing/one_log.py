"""One system's answers about logs, in a process of its own: `python -m diagnosing.one_log SYSTEM LOG…`.

Prints one object of JSON a log. SYSTEM is `holdfast`, `read` (reads it and counts its lines, the limit), a baseline's
name, or `nvrx`, which needs the extension's source on PYTHONPATH and prints what its command prints. In the end
the most memory that the process held goes to standard error, in KiB.
"""

import dataclasses
import json
import sys
from pathlib import Path


def main() -> None:
    _answer(*sys.argv[1:])
    # As the kernel counts since exec: what wait4 tells of a child is never less than what its parent held.
    (peak,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    print(peak.split()[1], file=sys.stderr)


def _answer(system: str, *logs: str) -> None:
    for log in logs:
        if system == "holdfast":
            from holdfast.diagnose import diagnose

            print(json.dumps(diagnose(log).to_json()), flush=True)
        elif system == "read":
            lines = 0
            with open(log, "rb", buffering=0) as file:  # noqa: PTH123  (as fast as can be)
                while block := file.read(1 << 20):
                    lines += block.count(b"\n")
            print(json.dumps({"lines": lines}), flush=True)
        elif system == "nvrx":
            from nvidia_resiliency_ext.attribution.restart_agent.cli import main as restart_agent  # type: ignore[import-not-found]

            restart_agent([log, "--job-id", "job", "--cycle-id", "0", "--disable-l1"])
        else:
            from diagnosing.baselines import BASELINES

            print(json.dumps(dataclasses.asdict(BASELINES[system](Path(log)))), flush=True)


if __name__ == "__main__":
    main()
