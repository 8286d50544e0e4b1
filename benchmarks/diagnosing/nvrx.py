"""Run the restart agent of NVIDIA's resiliency extension, from a checkout of its source.

The agent is deterministic (`--disable-l1`). Its answer is read in its favour where there is a
choice:

- The root line is `primary_failure.line`; without a primary failure, the line of its first
  secondary failure or cascade.
- The decision RESTART or STOP is `restart_helps`. The agent has no action, so a STOP counts as
  `user_must_fix`.
- The scope is the primary failure's `rank`, `node` and `gpu`, if given.
- The agent has no reasons. If its failure class is one (`REASONS`), that reason counts. Otherwise
  (`observed_exception` and other classes of several reasons) the reason of its cited line counts,
  by the list of the baselines.
- It gives no confidence.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from common.jobs import DoesNotWork
from diagnosing.baselines import answer_of_line, reason_of
from diagnosing.scoring import Answer

PACKAGE: Final = Path("src/nvidia_resiliency_ext/attribution/restart_agent/cli.py")
REASONS: Final[Mapping[str, str]] = {
    "artifact_or_path_not_found": "FileNotFoundError",
    "argument_validation_failure": "ArgumentError",
    "checkpoint_compatibility_mismatch": "ModelLoadingError",
    "cuda_oom": "OutOfMemoryError",
    "cuda_previous_error_cascade": "CUDAError",
    "filesystem_permission_denied": "PermissionError",
    "infra_policy_event": "NodeFailure",
    "linux_oom_kill_confirmation": "OutOfMemoryError",
    "observed_distributed_operation_timeout": "NCCLTimeoutError",
    "peer_gpu_memory_access_failure": "NVLinkError",
    "time_limit": "Others",
    "user_cancelled": "Others",
}
"""Its failure classes that mean one reason of Table 3.

The others (a hardware fault is ECC, NVLink or the node; an
exception is any) are read from the cited line."""


def missing(checkout: Path | None) -> str | None:
    """Return why the agent cannot run, in a sentence; None if it can."""
    if checkout is None:
        return "NVIDIA's restart agent is not run: give the folder of its source with --nvrx"
    if not (checkout / PACKAGE).is_file():
        return f"NVIDIA's restart agent is not run: {checkout} has no {PACKAGE}"
    return None


def answers(checkout: Path, logs: Sequence[Path]) -> list[Answer]:
    """Return the agent's answer for each log; each log is a separate job in one process.

    Raises:
        DoesNotWork: the agent failed, or left out answers.
    """
    done = subprocess.run(
        [sys.executable, "-m", "diagnosing.one_log", "nvrx", *(str(log.resolve()) for log in logs)],
        env=environment(checkout), capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(found) != len(logs):
        raise DoesNotWork(
            f"the restart agent answered {len(found)} of {len(logs)} logs:\n{done.stderr[-2000:]}"
        )
    return [read(payload, log) for payload, log in zip(found, logs, strict=True)]


def environment(checkout: Path | None) -> dict[str, str]:
    """Return the environment for a process with these modules, and the extension's if present."""
    paths = [
        str(Path(__file__).parents[1]),
        *([str(checkout.resolve() / "src")] if checkout else []),
    ]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def read(payload: Mapping[str, Any], log: Path) -> Answer:
    """Convert the agent's answer."""
    primary = _failure(payload)
    helps = payload["decision"] == "RESTART"
    known = {"restart_helps": helps, "action": "restart" if helps else "user_must_fix"}
    scope = {
        key: _number(primary[key])
        for key in ("rank", "node", "gpu")
        if primary.get(key) is not None
    }
    if primary.get("line") is None:
        return Answer(reason="Unknown", **known)
    text = _line(log, primary["line"])
    failure_class = primary["failure_class"]
    answer = answer_of_line(primary["line"], text)
    reason = REASONS.get(failure_class) or reason_of(text)
    return Answer(
        reason=reason, root_lines=answer.root_lines, scope=scope, decided_by=failure_class, **known
    )


def _failure(payload: Mapping[str, Any]) -> Mapping[str, Any]:
    if payload["primary_failure"]:
        return dict(payload["primary_failure"])
    others = [*payload.get("secondary_failures", ()), *payload.get("cascades", ())]
    first = dict(others[0]) if others else {}
    return {"line": first.get("first_line"), **first}


def _number(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _line(log: Path, number: int) -> str:
    return next((line for at, line in _numbered(log) if at == number), "")


def _numbered(log: Path) -> Iterator[tuple[int, str]]:
    with log.open(encoding="utf-8", errors="replace", newline="\n") as file:
        yield from enumerate(file, 1)
