"""A Lightning run with many random draws, which may kill its process."""

import os
import pickle
import signal
import warnings

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.checkpoint import Batches
from holdfast.checkpoint.integrations.lightning import HoldfastCheckpoint

EPOCHS = 3
BATCHES = 4


class Noisy(Dataset):
    """Draw random numbers for each item, as an augmentation does."""

    def __len__(self):
        return 4 * BATCHES

    def __getitem__(self, index):
        return index / 16 + torch.rand(1)


class Net(pl.LightningModule):
    def __init__(self, kill_at=None):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(1, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
        self.kill_at = kill_at
        self.losses = {}

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) - torch.randn(1)).square().mean()
        self.losses[self.global_step] = loss.item()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("noisy", self.net(batch).mean() + torch.randn(1))

    def on_train_batch_end(self, *_):
        if self.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def train_dataloader(self):
        return StatefulDataLoader(Noisy(), batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(torch.ones(4, 1), batch_size=2)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}
        ]


class Averaged(Net):
    """Keep an average of the weights, as many modules do."""

    def __init__(self, kill_at=None):
        super().__init__(kill_at)
        self.register_buffer("average", torch.zeros(8, 1))

    def on_train_batch_end(self, *_):
        self.average.lerp_(self.net[0].weight.detach(), 0.5)


class Pickled(Averaged):
    """A module that is pickled for workers, as the start method spawn does."""

    def training_step(self, batch, batch_idx):
        pickle.dumps(self)
        return super().training_step(batch, batch_idx)


class WithPlateau(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
        return [optimizer], [{"scheduler": scheduler, "monitor": "noisy"}]


class Wrapped(Net):
    def train_dataloader(self):
        self.numbers = []
        self.batches = Batches(DataLoader(Noisy(), batch_size=4, shuffle=True))
        return self.batches

    def training_step(self, batch, batch_idx):
        self.numbers.append(self.batches.number)
        return super().training_step(batch, batch_idx)


class InARow(Net):
    """Train on samples in order, whose loading draws no random numbers."""

    def train_dataloader(self):
        return Batches(DataLoader(torch.arange(16.0).view(16, 1) / 16, batch_size=4))


class WithoutSome:
    """A loader without some of its batches, given by their numbers over all epochs."""

    def __init__(self, loader, left_out):
        self.loader, self.left_out, self.number = loader, left_out, 0

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for batch in self.loader:
            self.number += 1
            if self.number not in self.left_out:
                yield batch


class ByHand(InARow):
    def train_dataloader(self):
        loader = DataLoader(torch.arange(16.0).view(16, 1) / 16, batch_size=4)
        return WithoutSome(loader, {3, 4, 5, 6})


def train(folder, *, seed=0, kill_at=None, net=Net, resume=True, trainer_options=None, **options):
    torch.set_num_threads(1)
    pl.seed_everything(seed, verbose=False)
    saves = HoldfastCheckpoint(folder, **{"every": 1, "keep": None, **options})
    own = {"max_epochs": EPOCHS, **(trainer_options or {})}
    stops = (
        []
        if own.get("limit_val_batches") == 0
        else [pl.callbacks.EarlyStopping("noisy", patience=50)]
    )
    with warnings.catch_warnings(action="ignore"):  # of advice, and of deprecated calls
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            callbacks=[saves, *stops],
            plugins=[saves.plugin],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **own,
        )
        module = net(kill_at)
        trainer.fit(module, ckpt_path=saves.ckpt_path() if resume else None)
    return trainer, module
