"""Memory that runs out: on the GPU, in the address space, by the kernel's or Slurm's killer."""

# ruff: noqa: E501  (lines of logs stand as they are printed)

from failure_lab.program import Program
from failure_lab.programs.hardware import LINEAR, hardware

PROGRAMS = (
    hardware(
        id="oom-cuda-forward",
        reason="OutOfMemoryError",
        cause="The activations do not fit the GPU.",
        root=r"OutOfMemoryError: CUDA out of memory",
        restart_helps=False,
        dialect="hf",
        name="run_sft.py",
        module="modeling",
        function="forward",
        within=LINEAR,
        step=2,
        prints="",
        raises=(
            "torch.OutOfMemoryError",
            (
                "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.13 GiB is free."
                " Including non-PyTorch memory, this process has 78.01 GiB memory in use. Of the allocated memory 70.12 GiB is"
                " allocated by PyTorch, and 5.87 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is"
                " large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for"
                " Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
            ),
        ),
    ),
    Program(
        id="oom-cpu-allocator",
        reason="OutOfMemoryError",
        cause="The host's memory limit does not allow the tensor.",
        root=r"DefaultCPUAllocator: can't allocate memory",
        faulty={"rank": 0},
        ranks=2,
        dialect="megatron",
        memory_bytes=12 << 30,
        script="""
        from checkpointing import gather_optimizer

        for step in training(6):
            if step == 3 and RANK == 0:
                gather_optimizer(shards=64)
        """,
        files={
            "checkpointing.py": """\
import torch


def gather_optimizer(shards):
    return torch.empty(shards, 1 << 28, dtype=torch.float32)
""",
        },
    ),
    Program(
        id="oom-numpy-array",
        reason="OutOfMemoryError",
        cause="A table of token counts is larger than the host's memory.",
        root=r"_ArrayMemoryError|MemoryError: Unable to allocate",
        launcher="python",
        name="tokenize_corpus.py",
        dialect=None,
        script="""
        import logging

        import numpy as np

        logging.basicConfig(format="%(asctime)s [%(levelname)s] %(message)s", level=logging.INFO)
        for number in range(4):
            logging.info("shard %d/512: 41,203,118 tokens", number)
        counts = np.zeros((256_000, 8192, 64), dtype=np.int64)
        """,
    ),
    hardware(
        id="oom-cgroup-kill",
        reason="OutOfMemoryError",
        cause="The kernel's memory killer ended a rank that had reached its cgroup's limit.",
        root=r"out of memory: Killed process|oom-kill:",
        accept_reasons=("DataloaderKilled",),
        restart_helps=False,
        dialect="deepspeed",
        ranks=3,
        rank=2,
        prints="""\
[2811290.446120] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=pod8f2,mems_allowed=0-1,oom_memcg=/kubepods/pod8f2c,task_memcg=/kubepods/pod8f2c/9b1e,task=python,pid=31245,uid=1000
[2811290.446198] Memory cgroup out of memory: Killed process 31245 (python) total-vm:298811236kB, anon-rss:251658240kB, file-rss:412032kB, shmem-rss:8196kB, UID:1000 pgtables:502144kB oom_score_adj:984
""",
        exits="os.kill(os.getpid(), signal.SIGKILL)",
    ),
    hardware(
        id="oom-slurm-step",
        reason="OutOfMemoryError",
        cause="Slurm's memory limit of the step was reached.",
        root=r"oom_kill event|Out Of Memory",
        restart_helps=False,
        dialect="titan",
        faulty={"node": "gpu20-15"},
        prefix="[rank${rank}]:",
        prints="""\
slurmstepd: error: Detected 1 oom_kill event in StepId=9411285.0. Some of the step tasks have been OOM Killed.
srun: error: gpu20-15: task 1: Out Of Memory
""",
        exits="os.kill(os.getpid(), signal.SIGKILL)",
    ),
)
