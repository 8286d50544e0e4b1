"""Run one rank of Lightning, in the environment that torchrun sets."""

import os
import warnings

import lightning.pytorch as pl
import torch
from lightning_training import Net

from holdfast.checkpoint.integrations.lightning import HoldfastCheckpoint

LONG_S = 25.0


class Numbers:
    """A loader of one rank, which continues at its last position."""

    def __init__(self):
        self.rank, self.drawn = int(os.environ.get("RANK", "0")), 0

    def __len__(self):
        return 1 << 30

    def __iter__(self):
        while True:
            self.drawn += 1
            yield torch.full((2, 1), float(1000 * self.rank + self.drawn)) / 1e4

    def state_dict(self):
        return {"rank": self.rank, "of_rank": [self.drawn] * (self.rank + 1)}

    def load_state_dict(self, state):
        assert state["rank"] == self.rank
        assert len(state["of_rank"]) == self.rank + 1
        self.drawn = state["of_rank"][0]


class Ranked(Net):
    def __init__(self, stop_at, asked):
        super().__init__()
        self.stop_at, self.asked = stop_at, asked
        self.saw = []

    def training_step(self, batch, batch_idx):
        self.saw.append(round(batch[0].item() * 1e4))
        if self.global_step == self.stop_at > 0 and self.global_rank == 0:
            self.asked.set()
        return self.net(batch).square().mean()

    def train_dataloader(self):
        return Numbers()


def train(folder, *, stop_at=0, steps, asked=None):
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    saves = HoldfastCheckpoint(folder, every=1 << 40, sigterm_grace_s=LONG_S)
    with warnings.catch_warnings(action="ignore"):
        trainer = pl.Trainer(
            max_steps=steps,
            accelerator="cpu",
            devices=int(os.environ.get("WORLD_SIZE", "1")),
            strategy="ddp" if "WORLD_SIZE" in os.environ else "auto",
            limit_val_batches=0,
            callbacks=[saves],
            plugins=[saves.plugin],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        module = Ranked(stop_at, asked)
        trainer.fit(module, ckpt_path=saves.ckpt_path())
    return trainer, module


def run_rank(rank, port, folder, saw, asked, **options):
    """Run one of two ranks, whose store is at `port`, and report the numbers that it saw.

    At step `stop_at`, rank 0 sets `asked`.
    """
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    _, module = train(folder, asked=asked, **options)
    saw.put((rank, module.saw))
