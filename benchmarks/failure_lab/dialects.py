"""Define how several trainers report steps, over one training loop."""

from dataclasses import dataclass

_LOOP = """\
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(1234)


{log}

def join(timeout_s=30):
    if WORLD > 1 and not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))


def build():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def training(steps, first=1, model=None):
    join()
    model = model or build()
    for step in range(first, first + steps):
        inputs = torch.randn(8, 16)
        loss = (model(inputs) - inputs).pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            if dist.is_initialized():
                dist.all_reduce(parameter.grad)
            parameter.data -= 3e-4 * parameter.grad
            parameter.grad = None
        time.sleep(0.15)
        if RANK == 0:
            log(step, loss.item())
        yield step


"""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The reporting of one trainer."""

    log: str
    """The Python function `log(step, loss)`."""
    progress: str
    """A regular expression that finds the lines it prints."""

    @property
    def prelude(self) -> str:
        """Return the beginning of a training script in this dialect."""
        return _LOOP.format(log=self.log)


DIALECTS = {
    "plain": Dialect(
        log="""\
def log(step, loss):
    print(f"step {step} | loss {loss:.4f} | lr 3.0e-04 | 1.2s/it", flush=True)
""",
        progress=r"step \d+ \| loss",
    ),
    "megatron": Dialect(
        log="""\
def log(step, loss):
    print(
        time.strftime(" [%Y-%m-%d %H:%M:%S]")
        + f" iteration {step:8d}/  500000 | consumed samples: {step * 1024:12d}"
        " | elapsed time per iteration (ms): 3121.4"
        f" | learning rate: 1.000000E-04 | global batch size:  1024 | lm loss: {loss:.6E} | loss scale: 1.0"
        f" | grad norm: 0.713 | number of skipped iterations:   0 | number of nan iterations:   0 |",
        flush=True,
    )
""",
        progress=r"iteration +\d+/",
    ),
    "titan": Dialect(
        log="""\
def log(step, loss):
    print(
        time.strftime("[titan] %Y-%m-%d %H:%M:%S,204 - root - INFO - ")
        + f"step: {step:2d}  loss: {loss:7.4f}  grad_norm: 1.0312  memory: 47.28GiB(59.74%)  tps: 6,817"
        "  tflops: 351.20  mfu: 35.51%",
        flush=True,
    )
""",
        progress=r"step: +\d+  loss:",
    ),
    "hf": Dialect(
        log="""\
def log(step, loss):
    report = {"loss": round(loss, 4), "grad_norm": 1.382, "learning_rate": 4.9e-05, "epoch": round(step / 500, 3)}
    print(report, flush=True)
    print(f"  {step // 10}%|▏         | {step}/5000 [00:0{step % 10}<2:11:42,  1.58s/it]", file=sys.stderr, flush=True)
""",
        progress=r"'grad_norm'|\d+/5000 \[",
    ),
    "deepspeed": Dialect(
        log="""\
def log(step, loss):
    now = time.strftime("[%Y-%m-%d %H:%M:%S,551] [INFO] [logging.py:107:log_dist] [Rank 0] ")
    print(now + f"step={step}, skipped=0, lr=[9.65e-06], mom=[(0.9, 0.95)]", flush=True)
    print(f"steps: {step} loss: {loss:.4f} iter time (s): 2.871 samples/sec: 89.164", flush=True)
""",
        progress=r"step=\d+, skipped|steps: \d+ loss",
    ),
    "lightning": Dialect(
        log="""\
def log(step, loss):
    pace = f"[00:0{step % 10}<12:02,  1.71it/s, v_num=3, train_loss={loss:.3f}]"
    print(f"Epoch 0:   {step}%|{'█' * step:<10}| {step}/1250 {pace}", flush=True)
""",
        progress=r"Epoch 0: .*train_loss",
    ),
}
