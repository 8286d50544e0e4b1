"""Programs with a rank that prints the lines of a failing device or scheduler, and dies."""

from collections.abc import Mapping
from typing import Any

from failure_lab.program import Program

ASYNCHRONOUS = """\
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
"""PyTorch's addition to every CUDA error (c10/cuda/CUDAException.cpp)."""

Place = tuple[str, str, str]
"""A place of torch at which Python calls into C++: the file, a part of the line, the function."""
BACKWARD: Place = ("autograd/graph.py", "_execution_engine.run_backward(", "_engine_run_backward")
LINEAR: Place = ("nn/modules/linear.py", "return F.linear(", "forward")
ALL_REDUCE: Place = (
    "distributed/distributed_c10d.py",
    "work = group.allreduce([tensor], opts)",
    "all_reduce",
)
BARRIER: Place = ("distributed/distributed_c10d.py", "work = group.barrier(opts=opts)", "barrier")

_MODULE = '''\
import os
import signal
import sys
import time

import torch
import torch.distributed

HERE = os.path.dirname(os.path.abspath(__file__))


def _said(name):
    with open(os.path.join(HERE, name), encoding="utf-8") as file:
        return file.read()


def _dies():
    sys.stderr.write(_said("driver.txt"))
    sys.stderr.flush()
    time.sleep(0.3)
    {exits}


def _at(path, text, name, error):
    """Return a function with the frame of a torch line at which a device error leaves C++."""
    path = os.path.join(os.path.dirname(torch.__file__), path)
    with open(path, encoding="utf-8") as file:
        line = next(number for number, one in enumerate(file) if text in one)
    space = {{"_dies": _dies, "_error": error}}
    exec(compile("\\n" * line + "def " + name + "(): _dies(); raise _error", path, "exec"), space)
    return space[name]


{function} = _at(*{within!r}, {error}(_said("runtime.txt").rstrip()))
'''


def hardware(
    *,
    id: str,  # noqa: A002
    reason: str,
    cause: str,
    root: str,
    prints: str,
    raises: tuple[str, str] | None = None,
    within: Place = BACKWARD,
    exits: str = "os.abort()",
    rank: int = 1,
    ranks: int = 2,
    step: int = 4,
    dialect: str = "plain",
    module: str = "model",
    function: str = "backward",
    name: str = "train.py",
    prefix: str = "",
    accept_reasons: tuple[str, ...] = (),
    restart_helps: bool = True,
    faulty: Mapping[str, Any] | None = None,
) -> Program:
    """Return a program whose rank `rank` prints `prints` at `step` and then ends.

    Its peers wait in an all-reduce. `raises` is an exception class and its message: the script
    calls `module`.`function`, and the exception is raised from `within`. Without `raises`, `exits`
    is run; the default is SIGABRT, as after an uncaught exception of a thread. An empty `faulty`
    blames no rank.
    """
    error, message = raises or ("SystemExit", "")
    source = _MODULE.format(
        exits="return" if raises else exits, function=function, within=within, error=error
    )
    script = f"""
    import {module}

    for step in training(8):
        if step == {step} and RANK == {rank}:
            {module}.{function}()
    """
    return Program(
        id=id,
        reason=reason,
        cause=cause,
        root=root,
        script=script,
        accept_reasons=accept_reasons,
        restart_helps=restart_helps,
        faulty={"rank": rank} if faulty is None else (faulty or None),
        ranks=ranks,
        dialect=dialect,
        name=name,
        prefix=prefix,
        files={f"{module}.py": source, "driver.txt": prints, "runtime.txt": message},
    )
