"""Run the demonstration's training, and record the time of each step of rank 0.

    timed_demo.py RESULT [arguments of holdfast.demo.train …]

At the end the moments (seconds, one clock) are written to the file RESULT; RESULT.training appears
at step 10.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.demo import train
from holdfast.recover import Run


def main() -> None:
    result = Path(sys.argv[1])
    moments_s: list[float] = []
    step = Run.step

    def timed(run: Run, number: int, **values: Any) -> None:
        moments_s.append(time.perf_counter())
        if number == 10 and os.environ["RANK"] == "0":
            result.with_suffix(".training").touch()
        step(run, number, **values)

    Run.step = timed  # type: ignore[method-assign]
    train.main(sys.argv[2:])
    if os.environ["RANK"] == "0":
        result.write_text(json.dumps(moments_s))


if __name__ == "__main__":
    main()
