"""Write a log of any size: a job of 64 ranks that trains for long and fails.

The cascade is printed before the root. The log is made of blocks. In each block the steps rise, and
the words that vary in real logs (addresses, shards, samples; in a tenth of the lines) are drawn
anew. So a system that remembers the shapes of lines cannot skip the later blocks.
"""

# ruff: noqa: E501, ISC004  (lines of logs stand as they are printed)

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

RANKS: Final = 64
STEPS_PER_BLOCK: Final = 4000
REASON: Final = "ECCError"
GUILTY: Final = 37

_STEP: Final = "%(step)s"
_WORD: Final = "%(word)s"
_EACH_STEP: Final = (
    " [2026-03-14 02:11:09] iteration %(step)s/ 5000000 | consumed samples: 17039360 | elapsed time per iteration (ms): 3121.4"
    " | learning rate: 1.499823E-04 | global batch size:  1024 | lm loss: 2.248531E+00 | loss scale: 1.0 | grad norm: 0.713"
    " | number of skipped iterations:   0 | number of nan iterations:   0 |",
)
_CHATTER: Final = (
    "[rank{rank}]:[titan] 2026-03-14 02:11:12,204 - root - INFO - step: %(step)s  loss:  2.2485  grad_norm:  0.7130  memory:"
    " 47.28GiB(59.74%)  tps: 6,412  tflops: 351.20  mfu: 35.51%",
    "node{node:02d}:{pid}:{tid} [{local}] NCCL INFO Channel 07/0 : {rank}[{local}] -> {peer}[{local}] [send] via NET/IB/{local}/GDRDMA",
    "(min, max) time across ranks (ms):",
    "    forward-backward ...............................: (2911.20, 2960.{pid})",
    "[Rank {rank}] (after %(step)s iterations) memory (MB) | allocated: 48213.6 | max allocated: 61022.9 | reserved: 66038.0",
    "[rank{rank}]: /opt/venv/lib/python3.11/site-packages/torch/autograd/graph.py:829: UserWarning: c10d::allreduce_: an autograd"
    " kernel was not registered to the Autograd key(s). This may lead to silently incorrect behavior.",
    "  successfully saved checkpoint from iteration %(step)s to /ckpt/gpt-7b [ t 1/4, p 1/2 ]",
    "wandb: Network error (ReadTimeout), entering retry loop.",
    "  {pid}%|##4       | %(step)s/5000000 [41:12<2:11:42,  1.58s/it]",
)
_VARIED: Final = (
    "node{node:02d}:{pid}:{tid} [{local}] NCCL INFO comm 0x%(word)s rank {rank} nranks 64 cudaDev {local} busId {local}b000 - Init COMPLETE",
    "[rank{rank}]:I0314 02:11:13.114 {pid} data/loader.py:212] shard /data/c4/%(word)s.tar opened, 10000 samples",
    "[rank{rank}]:I0314 02:11:13.219 {pid} data/loader.py:240] sample %(word)s: 4096 tokens, 2 documents",
    "2026-03-14 02:11:14 INFO storage: part %(word)s of checkpoint uploaded in 2.1 s",
)
_VARIED_SHARE: Final = 0.1
"""The share of chatter with varied words: most lines of a long log differ only in numbers."""
_RECOVERED: Final = (
    (
        "[rank{rank}]: Traceback (most recent call last):",
        '[rank{rank}]:   File "/opt/trainer/logging/sink.py", line 88, in flush',
        "[rank{rank}]:     self._run.log(record)",
        "[rank{rank}]: requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='api.tracker.local', port=443): Read timed out.",
        "[rank{rank}]: tracking is off for this interval; training continues",
    ),
    (
        "2026-03-14 02:11:15 WARNING storage: attempt 1/5 failed for %(word)s: connection reset by peer, retrying in 2.0 s",
        "2026-03-14 02:11:17 INFO storage: attempt 2/5 succeeded",
    ),
    (
        "node{node:02d} kernel: [883102.114203] mce: [Hardware Error]: Corrected error, no action required.",
    ),
)
_WATCHDOG: Final = (
    "[rank{rank}]:[E314 05:22:19.114203 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation timeout:"
    " WorkNCCL(SeqNum=120418, OpType=ALLREDUCE, NumelIn=33554432, NumelOut=33554432, Timeout(ms)=600000) ran for 600037"
    " milliseconds before timing out."
)
_ROOT: Final = (
    "[rank37]: Traceback (most recent call last):",
    '[rank37]:   File "/opt/trainer/loop.py", line 412, in train_step',
    "[rank37]:     loss.backward()",
    "[rank37]: torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
)
_TEARDOWN: Final = (
    "W0314 05:22:31.114203 40117 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 40152 closing signal SIGTERM",
    "srun: error: node05: task 37: Exited with exit code 1",
)


@dataclass(frozen=True, kw_only=True)
class BigLog:
    """A written log and its label."""

    path: Path
    size_bytes: int
    root_line: int


def write_big_log(path: Path, size_bytes: int, seed: int = 0) -> BigLog:
    """Write a log of about `size_bytes`."""
    draw = random.Random(seed)
    template, words, lines_per_block = _block(draw)
    lines = written = block = 0
    with path.open("wb", buffering=0) as file:
        while written < size_bytes:
            first = block * STEPS_PER_BLOCK
            drawn = os.urandom(6 * words).hex()
            values = _Values(first, drawn)
            data = (template % values).encode()
            if written + len(data) > size_bytes:  # the last block is cut where the size is reached
                data = data[: data.rfind(b"\n", 0, max(1, size_bytes - written)) + 1]
                lines += data.count(b"\n")
            else:
                lines += lines_per_block
            file.write(data)
            written += len(data)
            block += 1
            if not data:
                break
        end = [_WATCHDOG.format(rank=rank) for rank in range(RANKS) if rank != GUILTY]
        end += [*_ROOT, *_TEARDOWN]
        written += file.write(("\n".join(end) + "\n").encode())
    return BigLog(path=path, size_bytes=written, root_line=lines + RANKS - 1 + len(_ROOT))


class _Values(dict[str, str]):
    """Rising steps and newly drawn words, in the order of the template."""

    def __init__(self, first_step: int, drawn: str) -> None:
        super().__init__()
        self._step, self._drawn, self._at = first_step, drawn, 0

    def __getitem__(self, name: str) -> str:
        if name == "next":
            self._step += 1
            return ""
        if name == "step":
            return f"{self._step:8d}"
        self._at += 12
        return self._drawn[self._at - 12 : self._at]


def _block(draw: random.Random) -> tuple[str, int, int]:
    lines: list[str] = []
    for step in range(STEPS_PER_BLOCK):
        lines += [_filled("%(next)s" + line, draw) for line in _EACH_STEP]
        for _ in range(draw.randrange(4, 12)):
            lines.append(
                _filled(draw.choice(_VARIED if draw.random() < _VARIED_SHARE else _CHATTER), draw)
            )
        if step % 400 == 200:
            lines += _group(draw.choice(_RECOVERED), draw)
    text = "\n".join(lines) + "\n"
    return text, text.count(_WORD), len(lines)


def _filled(template: str, draw: random.Random) -> str:
    return _group((template,), draw)[0]


def _group(templates: tuple[str, ...], draw: random.Random) -> list[str]:
    rank = draw.randrange(RANKS)
    values = {
        "rank": rank, "local": rank % 8, "node": rank // 8, "peer": (rank + 8) % RANKS,
        "pid": draw.randrange(10, 99), "tid": draw.randrange(2000, 99_000),
    }  # fmt: skip
    # A percent sign of the text itself is doubled: the block is filled with `%` once more, each
    # time.
    return [_own_percents(template.format(**values)) for template in templates]


def _own_percents(text: str) -> str:
    kept = text.replace("%(", "\0")
    return kept.replace("%", "%%").replace("\0", "%(")
