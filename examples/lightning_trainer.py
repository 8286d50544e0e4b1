"""Lightning's Trainer with a small network that predicts the next byte; saves go on beside the training.

python examples/lightning_trainer.py --checkpoints /tmp/lightning
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import (
    StatefulDataLoader,
)  # says where it is, so that an epoch goes on where it was

from holdfast.checkpoint.integrations.lightning import HoldfastCheckpoint
from holdfast.demo.corpus import load_corpus

CONTEXT = 32


class ByteModel(pl.LightningModule):
    """Logits of shape (batch, bytes, 256) for bytes of shape (batch, bytes)."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def training_step(self, batch: list[Tensor], _batch_index: int) -> Tensor:
        """See Lightning."""
        (tokens,) = batch
        logits = self.head(self.memory(self.embedding(tokens[:, :-1]))[0])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        if self.global_step % 20 == 0:
            print(f"step {self.global_step} loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """See Lightning."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def train_dataloader(self) -> StatefulDataLoader:
        """The text in pieces of 32 bytes."""
        pieces = TensorDataset(load_corpus().train[: CONTEXT * 1024].long().view(-1, CONTEXT))
        return StatefulDataLoader(pieces, batch_size=16, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    args = parser.parse_args()

    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    saves = HoldfastCheckpoint(args.checkpoints, every=args.save_every, keep=3)  # Holdfast (1)
    trainer = pl.Trainer(
        max_steps=args.steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saves],  # Holdfast (2)
        plugins=[saves.plugin],
    )
    trainer.fit(ByteModel(), ckpt_path=saves.ckpt_path())  # Holdfast (3)


if __name__ == "__main__":
    main()
