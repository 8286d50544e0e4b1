"""Times single calls of `run.step`, and of a function that does nothing, alternately and spaced as steps are.

    step_calls.py CALLS RESULT

Writes `{"supervised": …, "step_us": […], "no_op_us": […]}`, the microseconds of each call, to the file RESULT.
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
    answer = {
        "supervised": run.supervised,
        "step_us": step_us[WARM_UP:],
        "no_op_us": no_op_us[WARM_UP:],
    }
    result.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
