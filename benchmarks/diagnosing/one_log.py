"""One system's answers about logs, in a process of its own: `python -m diagnosing.one_log SYSTEM LOG…`.

Prints one object of JSON a log. SYSTEM is `holdfast`, `read` (reads it and counts its lines, the limit), a baseline's
name, or `nvrx`, which needs the extension's source on PYTHONPATH and prints what its command prints.
"""

import dataclasses
import json
import sys
from pathlib import Path


def main() -> None:
    system, *logs = sys.argv[1:]
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
            from nvidia_resiliency_ext.attribution.restart_agent.cli import main as restart_agent

            restart_agent([log, "--job-id", "job", "--cycle-id", "0", "--disable-l1"])
        else:
            from diagnosing.baselines import BASELINES

            print(json.dumps(dataclasses.asdict(BASELINES[system](Path(log)))), flush=True)


if __name__ == "__main__":
    main()
