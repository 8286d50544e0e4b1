"""Define failures of four-rank jobs: the lines of each rank, the launcher and the kernel."""

import random
from dataclasses import dataclass

RANKS = 4


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failure: its lines by printer, and the expected diagnosis."""

    voices: dict[str, list[str]]
    reason: str
    scope: dict
    root: str
    """A part of the line that states the root."""

    def woven(self, draw: random.Random) -> list[str]:
        """Return one log in which the ranks' lines are interleaved at random."""
        return self._with_the_rest(_woven(self._of_ranks(), draw), draw)

    def concatenated(self, draw: random.Random) -> list[str]:
        """Return one log in which the ranks follow one another in random order."""
        ranks = self._of_ranks()
        draw.shuffle(ranks)
        return self._with_the_rest([line for lines in ranks for line in lines], draw)

    def _of_ranks(self) -> list[list[str]]:
        return [lines for name, lines in self.voices.items() if name.startswith("rank")]

    def _with_the_rest(self, lines: list[str], draw: random.Random) -> list[str]:
        """Insert the lines of launcher and kernel anywhere after the last step."""
        at = 1 + max(number for number, line in enumerate(lines) if " step " in line)
        rest = [list(lines) for name, lines in self.voices.items() if not name.startswith("rank")]
        return lines[:at] + _woven([lines[at:], *rest], draw)


def _woven(voices: list[list[str]], draw: random.Random) -> list[str]:
    left = [list(lines) for lines in voices]
    found = []
    while any(left):
        voice = draw.choice([lines for lines in left if lines])
        for _ in range(min(draw.choice([1, 1, 2, 5, 40]), len(voice))):
            found.append(voice.pop(0))
    return found


def steps(rank, *which):
    return [f"[rank{rank}]: step {step} loss {3 - step / 100:.2f}" for step in which]


def raised(rank, exception, path="/job/train.py"):
    lines = [
        "Traceback (most recent call last):",
        f'  File "{path}", line 8, in <module>',
        "    main()",
        exception,
    ]
    return [f"[rank{rank}]: {line}" for line in lines]


TORCH = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
GLOO = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[10.0.0.7]:54177. This is typically caused by a remote worker crashing."
)
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:328, remote "
    "process exited or there was a network error, NCCL version 2.21.5"
)
_API = "1121 01:54:32.555000 6362 torch/distributed/elastic/multiprocessing/api.py"
LAUNCHER = [
    f"W{_API}:1028] Sending process 4240 closing signal SIGTERM",
    f"E{_API}:1002] failed (exitcode: {{code}}) local_rank: {{rank}} (pid: 424{{rank}}) of binary: python",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
]


def launcher(rank, code=1):
    return [line.format(rank=rank, code=code) for line in LAUNCHER]


def watchdog(rank, sequence=902):
    said = (
        f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={sequence}, OpType=ALLREDUCE, "
        "NumelIn=4, Timeout(ms)=600000) ran for 600043 milliseconds before timing out."
    )
    return [f"[rank{rank}]:[E1121 01:54:30.1 ProcessGroupNCCL.cpp:632] {said}"]


def job(faulty, root, others, launched=None, kernel=(), before=range(101, 109)):
    voices = {
        f"rank{rank}": steps(rank, *before) + (root if rank == faulty else others(rank))
        for rank in range(RANKS)
    }
    if launched is not None:
        voices["launcher"] = launched
    if kernel:
        voices["kernel"] = list(kernel)
    return voices


FAILURES = {
    "key": Failure(
        voices=job(1, raised(1, "KeyError: 'missing'"), lambda rank: raised(rank, GLOO, TORCH), launcher(1)),
        reason="KeyError", scope={"rank": 1}, root="KeyError: 'missing'",
    ),
    "device memory": Failure(
        voices=job(
            2,
            raised(2, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has 79.10 GiB."),
            lambda rank: raised(rank, NCCL, TORCH),
            launcher(2),
        ),
        reason="OutOfMemoryError", scope={"rank": 2}, root="CUDA out of memory",
    ),
    "lost gpu": Failure(
        voices=job(
            3,
            raised(3, "torch.AcceleratorError: CUDA error: unspecified launch failure"),
            lambda rank: raised(rank, NCCL, TORCH),
            launcher(3),
            ["[ 4213.100001] NVRM: Xid (PCI:0000:b3:00): 79, pid=4243, name=python, GPU has fallen off the bus."],
        ),
        reason="NodeFailure", scope={"gpu": "0000:b3:00"}, root="fallen off the bus",
    ),
    "nvlink": Failure(
        voices=job(
            0,
            raised(0, "torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution"),
            watchdog,
            launcher(0),
            ["[ 4213.1] NVRM: Xid (PCI:0000:4e:00): 74, pid=4240, name=python, NVLink: fatal error detected on link 6"],
        ),
        reason="NVLinkError", scope={"gpu": "0000:4e:00", "link": 6}, root="NVLink",
    ),
    "killed": Failure(
        voices=job(1, [], lambda rank: raised(rank, GLOO, TORCH), launcher(1, -9)),
        reason="Others", scope={"local_rank": 1}, root="exitcode: -9",
    ),
    "out of memory": Failure(
        voices=job(
            1, [], lambda rank: raised(rank, GLOO, TORCH), launcher(1, -9),
            ["[ 4213.100001] Out of memory: Killed process 4241 (python) total-vm:9000kB, anon-rss:8000kB, UID:0"],
        ),
        reason="OutOfMemoryError", scope={}, root="Out of memory: Killed process 4241",
    ),
    "storage": Failure(
        voices=job(
            2,
            raised(2, "botocore.exceptions.ClientError: An error occurred (AccessDenied) when calling GetObject: no"),
            watchdog,
            launcher(2),
        ),
        reason="S3StorageError", scope={"rank": 2}, root="AccessDenied",
    ),
    "absent": Failure(
        voices=job(2, [], watchdog, launcher(0, -6)),
        reason="NCCLTimeoutError", scope={"rank": 2}, root="Watchdog caught",
    ),
}  # fmt: skip
"""An empty scope allows any scope."""
