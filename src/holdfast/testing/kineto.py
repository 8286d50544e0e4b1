"""Imitate PyTorch's profiler (Kineto) and the trace that it writes for a rank on a GPU.

No GPU is needed. The fake profiler has the methods of `torch.profiler.profile` that a deep capture
calls.
"""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

KERNELS = ("ampere_bf16_gemm", "flash_fwd_kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL")
"""The names of the kernels in a step, repeated in this order."""
LAUNCH_US, KERNEL_US = 10.0, 90.0


def kineto_trace(
    *, steps: int = 3, kernels_a_step: int = 6, rank: int = 0, world_size: int = 8
) -> dict[str, Any]:
    """Create a trace with three events for each kernel: operator, launch and kernel.

    The times are in µs.

    Args:
        steps: the number of captured steps.
        kernels_a_step: the number of kernels in one step.
        rank: the rank that was captured.
        world_size: the number of ranks of the job.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "ts": 0.0, "args": {"name": "python"}}
    ]  # fmt: skip
    at_us = 1000.0
    for number in range(steps * kernels_a_step):
        name = KERNELS[number % len(KERNELS)]
        launch: dict[str, Any] = {"correlation": number + 1}
        kernel = launch | {"device": rank, "stream": 20 if name.startswith("nccl") else 7}
        if name.startswith("nccl"):
            kernel |= {"Collective name": "allreduce", "Seq": number // len(KERNELS)}
        for category, of, pid, start_us, length_us, more in (
            ("cpu_op", "aten::op", 4242, at_us, LAUNCH_US, {"External id": number + 1}),
            ("cuda_runtime", "cudaLaunchKernel", 4242, at_us + 1, LAUNCH_US - 2, launch),
            ("kernel", name, rank, at_us + LAUNCH_US, KERNEL_US, kernel),
        ):
            events.append(
                {
                    "ph": "X",
                    "cat": category,
                    "name": of,
                    "pid": pid,
                    "tid": kernel["stream"] if category == "kernel" else 4242,
                    "ts": start_us,
                    "dur": length_us,
                    "args": more,
                }
            )
        at_us += LAUNCH_US + KERNEL_US
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": rank, "name": "NVIDIA H100 80GB HBM3"}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        "traceEvents": events,
    }


class FakeProfiler:
    """A profiler that writes the trace of `kineto_trace`."""

    def __init__(self, *, steps: int, kernels_a_step: int = 6, rank: int = 0) -> None:
        """Store the parameters of the trace; see `kineto_trace`."""
        self._trace = kineto_trace(steps=steps, kernels_a_step=kernels_a_step, rank=rank)
        found = [one for one in self._trace["traceEvents"] if one["ph"] == "X"]
        self.profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: found))
        self.is_running = False

    def start(self) -> None:
        """Start recording the trace."""
        self.is_running = True

    def stop(self) -> None:
        """Stop recording the trace."""
        self.is_running = False

    def export_chrome_trace(self, path: str) -> None:
        """Write the trace, compressed if the name ends in `.gz`.

        Raises:
            RuntimeError: the profiler is still running.
        """
        if self.is_running:
            raise RuntimeError("The profiler must be stopped before its trace is written.")
        content = json.dumps(self._trace).encode()
        Path(path).write_bytes(gzip.compress(content) if path.endswith(".gz") else content)
