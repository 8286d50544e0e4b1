"""End a pod with an exit code and a termination message that Jobs and JobSets can act on.

In a pod, `holdfast run` ends with

| code | class | meaning |
|---|---|---|
| 0 | completed | the job completed |
| 1 | failed | the job failed, and a restart would not help |
| 2 | misuse | wrong use; nothing was started |
| 3 | budget-spent | the budget of restarts is spent |
| 4 | stopped | a person has stopped the run |
| 75 | unavailable | ledger, storage or Holdfast itself failed: start again within `backoffLimit` |
| 143 | again | SIGTERM, as for a drain or a preemption: start the pod again, on any free node |

A JobSet sees only the exit code of a pod, in the condition of the failed Job. The termination
message is one line, for people and for controllers that read pods, such as

    holdfast class=again code=143: Stopped by SIGTERM. …
"""

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ParamSpec

from holdfast.core.errors import BadUse, HoldfastError

CLASSES = {
    0: "completed",
    1: "failed",
    2: "misuse",
    3: "budget-spent",
    4: "stopped",
    75: "unavailable",
    143: "again",
}
UNAVAILABLE = 75
AGAIN = 143
BY_SIGTERM = "Stopped by SIGTERM"
MESSAGE_BYTES = 4096
"""The most bytes of a termination message that the kubelet keeps."""
ENV_MESSAGE = "HOLDFAST_TERMINATION_LOG"
MESSAGE_PATH = "/dev/termination-log"
"""The default of a container's `terminationMessagePath`; the kubelet creates the file."""


class PodUnavailable(HoldfastError):
    """Something outside the job failed in this pod, so starting the pod again may help."""

    exit_code = UNAVAILABLE


def is_in_pod(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if Kubernetes started this process.

    The result is False in a Slurm job, even if the nodes of Slurm are pods.
    """
    return "KUBERNETES_SERVICE_HOST" in environment and "SLURM_JOB_ID" not in environment


def end_of_pod(exit_code: int, sentence: str, environment: Mapping[str, str] = os.environ) -> int:
    """Write the termination message, and return the exit code for the pod.

    Outside a pod, nothing is written and the exit code is not changed.

    Args:
        exit_code: the exit code of the run.
        sentence: the outcome of the run.
        environment: the environment variables of this process.
    """
    if not is_in_pod(environment):
        return exit_code
    if exit_code == 4 and sentence.startswith(BY_SIGTERM):
        exit_code = AGAIN
    line = f"holdfast class={CLASSES.get(exit_code, 'other')} code={exit_code}: {' '.join(sentence.split())}"
    path = Path(environment.get(ENV_MESSAGE) or MESSAGE_PATH)
    try:
        if path.exists():  # Kubernetes makes the file; without the file, no program reads a message
            path.write_bytes(line.encode()[:MESSAGE_BYTES])
    except OSError:  # the exit code alone is enough
        pass
    return exit_code


_P = ParamSpec("_P")


def ends_pod(command: Callable[_P, int]) -> Callable[_P, int]:
    """Decorate a command so that its errors end the pod with one of this module's exit codes.

    An error that the user must fix keeps its exit code. Any other error may be temporary, so its
    code requests that the pod be started again.
    """

    @functools.wraps(command)
    def told(*args: _P.args, **kwargs: _P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except (HoldfastError, OSError) as error:
            is_misuse = isinstance(error, BadUse)
            code = BadUse.exit_code if is_misuse else UNAVAILABLE
            if not is_in_pod():
                raise
            end_of_pod(code, str(error))
            if is_misuse:
                raise
            raise PodUnavailable(str(error)) from error

    return told
