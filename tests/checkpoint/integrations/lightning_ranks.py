"""Run one rank of Lightning under torchrun: `lightning_ranks.py FOLDER STOP_AT STEPS`.

At step STOP_AT, rank 0 requests a stop from torchrun; 0: no stop.
"""

import os
import signal
import sys
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
    def __init__(self, stop_at):
        super().__init__()
        self.stop_at = stop_at
        self.saw = []

    def training_step(self, batch, batch_idx):
        self.saw.append(round(batch[0].item() * 1e4))
        if self.global_step == self.stop_at > 0 and self.global_rank == 0:
            os.kill(os.getppid(), signal.SIGTERM)
        return self.net(batch).square().mean()

    def train_dataloader(self):
        return Numbers()


def train(folder, *, stop_at=0, steps):
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
        module = Ranked(stop_at)
        trainer.fit(module, ckpt_path=saves.ckpt_path())
    return trainer, module


if __name__ == "__main__":
    _, module = train(sys.argv[1], stop_at=int(sys.argv[2]), steps=int(sys.argv[3]))
    sys.stdout.write(f"rank {module.global_rank} saw {module.saw}\n")
