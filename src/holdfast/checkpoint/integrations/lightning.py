"""Saving and resuming in Lightning's Trainer: beside the training, verified, to the bit.

    saves = HoldfastCheckpoint(DIR, every=100)
    trainer = Trainer(callbacks=[saves], plugins=[saves.plugin], ...)
    trainer.fit(model, ckpt_path=saves.ckpt_path())

Lightning lets a plugin write on rank 0 alone, while a checkpoint here is made by all ranks; so a callback saves, on
all of them, what Lightning itself would put into a file, and the plugin reads it back.

Lightning restores no random generators. They are put back where they were saved: before the next batch is drawn, or,
at the end of an epoch, before the next epoch orders its batches.
"""

import logging
import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from holdfast.checkpoint import Batches, Checkpointer
from holdfast.checkpoint.config import checkpoint_folder
from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.integrations import missing
from holdfast.checkpoint.integrations.generators import Generators
from holdfast.checkpoint.integrations.reporting import Reporter
from holdfast.checkpoint.schedule.data_workers import replaced
from holdfast.core.errors import BadUse, StateMismatch
from holdfast.core.link import accumulation, connected_link

try:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.loops import _Loop
    from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
except ImportError as error:
    raise missing(error, "lightning") from error

_logger = logging.getLogger("holdfast")
_WEIGHTS = "state_dict"
"""Lightning's name of the weights; in a checkpoint they lie under `model`, as everywhere."""
_LOADERS = "combined_loader"
"""And of its loaders' places in the data, which differ by rank."""


class HoldfastCheckpoint(Checkpoint):
    """Saves what Lightning would, every so many of the optimizer's steps; stands in for `ModelCheckpoint`."""

    def __init__(self, dir: str | os.PathLike[str], **options: Any) -> None:  # noqa: A002 - as of Checkpointer
        """Take what `holdfast.Checkpointer` takes; `every` counts the optimizer's steps.

        Raises:
            BadUse: an argument is not allowed, or `dir` cannot be written.
        """
        self.folder = checkpoint_folder(dir)
        self._ckpt = Checkpointer(dir, **options)
        self._generators = Generators()
        self._loader_states: list[dict[str, Any]] = []
        self._saved_step = 0
        self._was_read = False
        self._replaced = ExitStack()
        self._reporter = Reporter()
        self._step_began_s = 0.0
        self._accumulates: Trainer | None = None
        """The trainer whose accumulation is that of this number of ranks."""
        self.plugin = HoldfastCheckpointIO(self)

    def ckpt_path(self) -> str | None:
        """Return the value for `ckpt_path`: the folder of the checkpoints, or None if there is no checkpoint.

        Lightning then reads the newest checkpoint that verifies.

        Raises:
            NotFound, StorageFailed: this host has no checkpoint, and the storage of `push_to` cannot be read.
        """
        return str(self.folder) if self._ckpt.has_any() else None

    def read(self) -> dict[str, Any]:
        """The newest checkpoint that verifies, as Lightning takes it. Collective.

        Raises:
            NoVerifiedCheckpoint: none does.
        """
        read: dict[str, Any] = {"model": None, "lightning": None}
        own: dict[str, Any] = {_LOADERS: None}
        try:
            step = self._generators.restore(self._ckpt, read, per_rank=own)
        except StateMismatch:  # it has no loaders for this rank
            own.clear()
            step = self._generators.restore(self._ckpt, read)
        if not step:
            raise BadUse(
                f"There is no checkpoint in {self.folder}. Pass ckpt_path=saves.ckpt_path() to fit()."
            )
        loop = read["lightning"]["loops"]["fit_loop"]["state_dict"]
        loop.update(own)
        if _LOADERS not in loop and Ranks().rank == 0:
            _logger.warning(
                "The checkpoint of step %d does not say where each of these ranks was in its data. The loaders begin "
                "their epoch anew.",
                step,
            )
        self._loader_states = loop.get(_LOADERS, [])
        self._was_read = True
        return {_WEIGHTS: read["model"], **read["lightning"]}

    def setup(self, trainer: Trainer, _module: Any, stage: str) -> None:
        """Accumulate more gradients on fewer nodes than usual, so that a step has as many samples."""
        if stage == "fit" and self._accumulates is not trainer:  # a second fit must not do so again
            self._accumulates = trainer
            trainer.accumulate_grad_batches *= accumulation()

    def on_train_start(self, trainer: Trainer, _module: Any) -> None:
        """Put the random generators back, where training goes on within an epoch; take SIGTERM back.

        Raises:
            BadUse: training begins anew over checkpoints.
        """
        if not self._was_read and self._ckpt.restore(
            {}
        ):  # also one that object storage has, and the folder had not
            raise BadUse(
                f"There are checkpoints in {self.folder}. Pass ckpt_path=saves.ckpt_path() to fit()."
            )
        self._saved_step = trainer.global_step
        if self._ckpt._sigterm is not None:
            # Lightning's handler has each rank break off at the end of its own batch, before all could save.
            self._ckpt._sigterm.take_back()
        self._reporter.begin(trainer.global_step)
        handler = signal.getsignal(signal.SIGTERM)
        if isinstance(
            handler, _HandlersCompose
        ):  # for the same reason; a script's own handler stays
            connected_link().take_back_sigterm(handler.signal_handlers)
        self._step_began_s = time.monotonic()
        loop = trainer.fit_loop
        if loop.restarted_mid_epoch:
            self._generators.put_back()
        elif loop.restarting and loop.epoch_loop._num_ready_batches_reached():
            # With max_steps, Lightning would go on with the epoch that has ended, by a batch too many.
            if loop.restarted_on_epoch_end:
                loop.epoch_progress.increment_completed()
            loop.reset_restart_stage()
            _Loop.restarting.fset(loop, False)  # by its own setter it stays

    def on_train_epoch_start(self, trainer: Trainer, _module: Any) -> None:
        """Put them back, where it goes on with an epoch, and have that ordered once more, by them."""
        if self._generators.are_held:
            loop = trainer.fit_loop
            # Lightning does so within an epoch alone, or too early. They were at its end; the next begins after it.
            loop._combined_loader._load_state_dicts(self._loader_states)
            iter(loop._combined_loader)
            loop._resuming_from_checkpoint = False
            self._generators.put_back()

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, *_args: Any, **_kwargs: Any
    ) -> None:
        """Save, within an epoch, once the module has ended the batch, too: of that it hears next."""
        self._report(trainer, outputs)
        if trainer.is_last_batch:
            return
        end_batch = module.on_train_batch_end

        def end_and_save(*args: Any, **kwargs: Any) -> None:
            self._replaced.close()  # between batches the module is as it was, and may be pickled
            end_batch(*args, **kwargs)
            self._save(trainer, is_end=0 < trainer.max_steps <= trainer.global_step)

        self._replaced.enter_context(replaced(module, "on_train_batch_end", end_and_save))

    def on_train_epoch_end(self, trainer: Trainer, _module: Any) -> None:
        """Save, at its end: after the evaluation, and what other callbacks make of it."""
        if trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            # Lightning keeps the iterator of an epoch that `limit_train_batches` has ended.
            for loader in trainer.fit_loop._combined_loader.flattened:
                if isinstance(loader, Batches):
                    loader.end_epoch()
        trainer.fit_loop._restarting = (
            False  # else a ReduceLROnPlateau leaves out the epoch that was gone on with
        )
        # It steps after this: then the next step that is told of is saved.
        if not any(
            each.reduce_on_plateau and each.interval == "epoch"
            for each in trainer.lr_scheduler_configs
        ):
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, _module: Any) -> None:
        """Save, and wait until all is durable."""
        self._save(trainer, is_end=True)
        self._reporter.end()
        self._ckpt.wait()

    def on_validation_start(self, _trainer: Trainer, _module: Any) -> None:
        """Mark an evaluation."""
        self._reporter.enter("evaluate")

    def on_validation_end(self, _trainer: Trainer, _module: Any) -> None:
        """End the evaluation."""
        self._reporter.leave()
        self._step_began_s = time.monotonic()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, _trainer: Trainer, _module: Any, _error: BaseException) -> None:
        """Leave the module as it was."""
        self._replaced.close()

    def _report(self, trainer: Trainer, outputs: Any) -> None:
        if (
            trainer.global_step == self._reporter.step_reported
        ):  # gradients are accumulated over batches
            return
        now_s = time.monotonic()
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        batch_size = getattr(trainer.train_dataloader, "batch_size", None)
        samples = (
            (batch_size if isinstance(batch_size, int) else 0)
            * trainer.accumulate_grad_batches
            * trainer.world_size
        )
        rate = samples / max(now_s - self._step_began_s, 1e-9) if samples else None
        self._step_began_s = now_s
        self._reporter.step(trainer.global_step, loss=loss, samples_per_second=rate)

    def _save(self, trainer: Trainer, *, is_end: bool = False) -> None:
        if trainer.fast_dev_run:
            return
        if trainer.global_step > self._saved_step or (is_end and trainer.global_step):
            self._saved_step = trainer.global_step
            own: dict[str, Any] = {}
            self._ckpt.save(
                trainer.global_step, lambda: _state(trainer, own), per_rank=own, force=is_end
            )


class HoldfastCheckpointIO(TorchCheckpointIO):
    """Reads the folder of checkpoints that `HoldfastCheckpoint` writes, and files of Lightning's own; writes these."""

    def __init__(self, saves: HoldfastCheckpoint) -> None:
        self._saves = saves

    def load_checkpoint(
        self, path: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Read what Lightning asks for."""
        if str(path) == str(self._saves.folder):
            return self._saves.read()
        read: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        return read


def _state(trainer: Trainer, own: dict[str, Any]) -> dict[str, Any]:
    """Return the state that is equal on all ranks; put the state of this rank alone into `own`."""
    lightning = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    own[_LOADERS] = lightning["loops"]["fit_loop"]["state_dict"].pop(_LOADERS, [])
    return {"model": lightning.pop(_WEIGHTS), "lightning": lightning}
