"""Time single calls of `run.step` and of an empty function, in turn, spaced as steps are.

    step_calls.py CALLS RESULT

Writes `{"supervised": …, "step_us": […], "no_op_us": […], "cpu_us": …}`, the microseconds of each
call, to the file RESULT. `cpu_us` is the CPU time that a call of `run.step` takes, in all threads
of this process.
"""

import json
import sys
import time
from pathlib import Path

import torch

import holdfast

PAUSE_S = 0.002
WARM_UP = 50


def nothing(_step: int, *, loss: torch.Tensor) -> None:
    """Do nothing."""


def main() -> None:
    calls, result = int(sys.argv[1]), Path(sys.argv[2])
    run = holdfast.attach()
    loss = torch.tensor(1.5, requires_grad=True) * 2
    step_us, no_op_us = [], []
    for step in range(1, calls + WARM_UP + 1):
        for call, times_us in ((nothing, no_op_us), (run.step, step_us)):
            time.sleep(PAUSE_S)
            began_ns = time.perf_counter_ns()
            call(step, loss=loss)
            times_us.append((time.perf_counter_ns() - began_ns) / 1000)
    cpu_us = []
    for call in (nothing, run.step):
        time.sleep(0.5)  # for what is still being sent
        began_ns = time.process_time_ns()
        for step in range(calls + WARM_UP + 1, 2 * calls + WARM_UP + 1):
            time.sleep(PAUSE_S)
            call(step, loss=loss)
        time.sleep(0.5)
        cpu_us.append((time.process_time_ns() - began_ns) / 1000 / calls)
    answer = {
        "cpu_us": cpu_us[1] - cpu_us[0],
        "supervised": run.supervised,
        "step_us": step_us[WARM_UP:],
        "no_op_us": no_op_us[WARM_UP:],
    }
    result.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
