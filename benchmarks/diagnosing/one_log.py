"""Answer logs by one system in this process: `python -m diagnosing.one_log SYSTEM LOG…`.

One JSON object per log is printed. SYSTEM is one of:

- `holdfast`,
- `read`: the limit, which reads the log and counts its lines,
- a baseline's name,
- `nvrx`, which needs the extension's source on PYTHONPATH and prints its command's output.

In the end, the peak memory of the process is written to standard error, in KiB.
"""

import dataclasses
import json
import sys
from pathlib import Path


def main() -> None:
    _answer(*sys.argv[1:])
    # The kernel's own count since exec: wait4 reports at least the memory of the child's parent.
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
