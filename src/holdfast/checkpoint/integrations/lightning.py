"""Saving and resuming in Lightning's Trainer: beside the training, verified, to the bit.

    saves = HoldfastCheckpoint(DIR, every=100)
    trainer = Trainer(callbacks=[saves], plugins=[saves.plugin], ...)
    trainer.fit(model, ckpt_path=saves.ckpt_path())

Lightning lets a plugin write on rank 0 alone, while a checkpoint here is made by all ranks; so a callback saves, on
all of them, what Lightning itself would put into a file, and the plugin reads it back.

Lightning restores no random generators. They are put back where they were saved: before the next batch is drawn, or,
at the end of an epoch, before the next epoch orders its batches.
"""

import os
from pathlib import Path
from typing import Any

from holdfast.checkpoint import Checkpointer, rng
from holdfast.checkpoint.integrations import missing
from holdfast.core.errors import BadUse

try:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import Checkpoint
except ImportError as error:
    raise missing(error, "lightning") from error

_WEIGHTS = "state_dict"
"""Lightning's name of the weights; in a checkpoint they lie under `model`, as everywhere."""


class HoldfastCheckpoint(Checkpoint):
    """Saves what Lightning would, every so many of the optimizer's steps; stands in for `ModelCheckpoint`."""

    def __init__(self, dir: str | os.PathLike[str], **options: Any) -> None:  # noqa: A002 - as of Checkpointer
        """Take what `holdfast.Checkpointer` takes; `every` counts the optimizer's steps.

        Raises:
            BadUse: an argument is not allowed, or `dir` cannot be written.
        """
        self.folder = Path(dir).absolute()
        self._ckpt = Checkpointer(dir, **options)
        self._generators: dict[str, Any] | None = None
        self._saved_step = 0
        self._was_read = False
        self.plugin = HoldfastCheckpointIO(self)

    def ckpt_path(self) -> str | None:
        """What to pass as `ckpt_path`: None where there is no checkpoint, else the newest that verifies is read.

        Raises:
            NotFound, StorageFailed: there is none here, and the storage of `push_to` cannot be looked at.
        """
        return str(self.folder) if self._ckpt.has_any() else None

    def read(self) -> dict[str, Any]:
        """The newest checkpoint that verifies, as Lightning takes it. Collective.

        Raises:
            NoVerifiedCheckpoint: none does.
        """
        before = rng.capture()
        read: dict[str, Any] = {"model": None, "lightning": None}
        if not self._ckpt.restore(read):
            raise BadUse(f"There is no checkpoint in {self.folder}. Pass ckpt_path=saves.ckpt_path() to fit().")
        self._generators = rng.capture()
        rng.put_back(before)
        self._was_read = True
        return {_WEIGHTS: read["model"], **read["lightning"]}

    def on_train_start(self, trainer: Trainer, _module: Any) -> None:
        """Put the random generators back, where training goes on within an epoch.

        Raises:
            BadUse: training begins anew over checkpoints.
        """
        if not self._was_read and self._ckpt.restore({}):  # also one that object storage has, and the folder had not
            raise BadUse(f"There are checkpoints in {self.folder}. Pass ckpt_path=saves.ckpt_path() to fit().")
        self._saved_step = trainer.global_step
        if trainer.fit_loop.restarted_mid_epoch:
            self._put_back()

    def on_train_epoch_start(self, trainer: Trainer, _module: Any) -> None:
        """Put them back, where it goes on with an epoch, and have that ordered once more, by them."""
        if self._generators is not None:
            loop = trainer.fit_loop
            # Lightning puts loaders back within an epoch alone. These were at its end, and the next begins after it.
            loop._combined_loader._load_state_dicts(loop._combined_loader_states_to_load)
            iter(loop._combined_loader)
            loop._resuming_from_checkpoint = False
            self._put_back()

    def on_train_batch_end(self, trainer: Trainer, *_args: Any, **_kwargs: Any) -> None:
        """Save, within an epoch."""
        if not trainer.is_last_batch:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, _module: Any) -> None:
        """Save, at its end: after the evaluation, and what other callbacks make of it."""
        self._save(trainer)

    def on_train_end(self, *_args: Any) -> None:
        """Wait until all is durable."""
        self._ckpt.wait()

    def _put_back(self) -> None:
        if self._generators is not None:
            rng.put_back(self._generators)
            self._generators = None

    def _save(self, trainer: Trainer) -> None:
        if trainer.global_step > self._saved_step:
            self._saved_step = trainer.global_step
            self._ckpt.save(trainer.global_step, lambda: _state(trainer))


class HoldfastCheckpointIO(TorchCheckpointIO):
    """Reads the folder of checkpoints that `HoldfastCheckpoint` writes, and files of Lightning's own; writes these."""

    def __init__(self, saves: HoldfastCheckpoint) -> None:
        self._saves = saves

    def load_checkpoint(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read what Lightning asks for."""
        if str(path) == str(self._saves.folder):
            return self._saves.read()
        read: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        return read


def _state(trainer: Trainer) -> dict[str, Any]:
    lightning = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return {"model": lightning.pop(_WEIGHTS), "lightning": lightning}
