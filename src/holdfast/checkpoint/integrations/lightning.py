"""Save and resume exactly in Lightning's Trainer, by a callback and a plugin.

    saves = HoldfastCheckpoint(DIR, every=100)
    trainer = Trainer(callbacks=[saves], plugins=[saves.plugin], ...)
    trainer.fit(model, ckpt_path=saves.ckpt_path())

Saves run in the background, and a restore verifies every byte. Lightning lets a plugin write only
on rank 0, but all ranks take part in a save of Holdfast. So a callback on all ranks saves the state
that Lightning would write, and the plugin only reads checkpoints.

Lightning does not restore random generators. Holdfast restores them at the same point at which they
were saved. Within an epoch, this is before the next batch is drawn. At the end of an epoch, it is
before the order of the next epoch is drawn.
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
"""The key of the weights in Lightning's checkpoints; in Holdfast's, the key is `model`."""
_LOADERS = "combined_loader"
"""Lightning's key of the loaders' positions in the data, which differ by rank."""


class HoldfastCheckpoint(Checkpoint):
    """Save Lightning's state every N steps of the optimizer, in place of `ModelCheckpoint`."""

    def __init__(self, dir: str | os.PathLike[str], **options: Any) -> None:  # noqa: A002 - as of Checkpointer
        """Create the callback with options of `holdfast.Checkpointer`.

        `every` counts steps of the optimizer.

        Raises:
            BadUse: an argument is not allowed, or `dir` is not writable.
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
        """The trainer whose gradient accumulation was adapted to the number of ranks."""
        self.plugin = HoldfastCheckpointIO(self)

    def ckpt_path(self) -> str | None:
        """Return the value to pass as `ckpt_path`.

        The value is the folder of the checkpoints, or None if it has no checkpoint. With the
        folder, Lightning resumes from the newest checkpoint that verifies.

        Raises:
            NotFound, StorageFailed: the folder has no checkpoint, and `push_to` cannot be read.
        """
        return str(self.folder) if self._ckpt.has_any() else None

    def read(self) -> dict[str, Any]:
        """Return the state of the newest checkpoint that verifies, for Lightning. Collective.

        Raises:
            BadUse: there is no checkpoint.
            NoVerifiedCheckpoint: there are checkpoints, but none verifies.
        """
        read: dict[str, Any] = {"model": None, "lightning": None}
        own: dict[str, Any] = {_LOADERS: None}
        try:
            step = self._generators.restore(self._ckpt, read, per_rank=own)
        except StateMismatch:  # the checkpoint has no loader positions for this rank
            own.clear()
            step = self._generators.restore(self._ckpt, read)
        if not step:
            raise BadUse(
                f"There is no checkpoint in {self.folder}. Pass ckpt_path=saves.ckpt_path() to "
                "fit()."
            )
        loop = read["lightning"]["loops"]["fit_loop"]["state_dict"]
        loop.update(own)
        if _LOADERS not in loop and Ranks().rank == 0:
            _logger.warning(
                "The checkpoint of step %d has no position in the data for these ranks. "
                "The loaders restart their epoch.",
                step,
            )
        self._loader_states = loop.get(_LOADERS, [])
        self._was_read = True
        return {_WEIGHTS: read["model"], **read["lightning"]}

    def setup(self, trainer: Trainer, _module: Any, stage: str) -> None:
        """Accumulate more gradients on fewer nodes, so that a step has as many samples."""
        # A second fit must not multiply again.
        if stage == "fit" and self._accumulates is not trainer:
            self._accumulates = trainer
            trainer.accumulate_grad_batches *= accumulation()

    def on_train_start(self, trainer: Trainer, _module: Any) -> None:
        """Restore the random generators if training resumes within an epoch.

        The handlers of SIGTERM that Lightning has replaced are installed again.

        Raises:
            BadUse: training starts from the beginning although there are checkpoints.
        """
        # `restore` also finds a checkpoint in object storage that the folder lacks.
        if not self._was_read and self._ckpt.restore({}):
            raise BadUse(
                f"There are checkpoints in {self.folder}. Pass ckpt_path=saves.ckpt_path() to "
                "fit()."
            )
        self._saved_step = trainer.global_step
        if self._ckpt._sigterm is not None:
            # Lightning's handler would stop each rank after its own batch, before all can save.
            self._ckpt._sigterm.take_back()
        self._reporter.begin(trainer.global_step)
        handler = signal.getsignal(signal.SIGTERM)
        # For the same reason, replace Lightning's handler; a script's own handler stays.
        if isinstance(handler, _HandlersCompose):
            connected_link().take_back_sigterm(handler.signal_handlers)
        self._step_began_s = time.monotonic()
        loop = trainer.fit_loop
        if loop.restarted_mid_epoch:
            self._generators.put_back()
        elif loop.restarting and loop.epoch_loop._num_ready_batches_reached():
            # With max_steps, Lightning would continue the ended epoch, by one batch too many.
            if loop.restarted_on_epoch_end:
                loop.epoch_progress.increment_completed()
            loop.reset_restart_stage()
            _Loop.restarting.fset(loop, False)  # the subclass's setter would not clear the flag

    def on_train_epoch_start(self, trainer: Trainer, _module: Any) -> None:
        """If training resumes between epochs, restore the generators and draw the order again."""
        if self._generators.are_held:
            loop = trainer.fit_loop
            # Between epochs, Lightning restores the loaders' positions either not at all, or before
            # the generators are restored. The saved positions are at the end of an epoch, so the
            # loaders begin the next epoch in this call.
            loop._combined_loader._load_state_dicts(self._loader_states)
            iter(loop._combined_loader)
            loop._resuming_from_checkpoint = False
            self._generators.put_back()

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, *_args: Any, **_kwargs: Any
    ) -> None:
        """Save within an epoch.

        The save runs after the module's own `on_train_batch_end`, which Lightning calls after this
        one.
        """
        self._report(trainer, outputs)
        if trainer.is_last_batch:
            return
        end_batch = module.on_train_batch_end

        def end_and_save(*args: Any, **kwargs: Any) -> None:
            # Restore the module at once: it may be pickled between batches.
            self._replaced.close()
            end_batch(*args, **kwargs)
            self._save(trainer, is_end=0 < trainer.max_steps <= trainer.global_step)

        self._replaced.enter_context(replaced(module, "on_train_batch_end", end_and_save))

    def on_train_epoch_end(self, trainer: Trainer, _module: Any) -> None:
        """Save at the end of an epoch, after the evaluation and the other callbacks."""
        if trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            # Lightning does not end the iterator of an epoch that `limit_train_batches` ends.
            for loader in trainer.fit_loop._combined_loader.flattened:
                if isinstance(loader, Batches):
                    loader.end_epoch()
        # Otherwise, a ReduceLROnPlateau would omit its step for the resumed epoch.
        trainer.fit_loop._restarting = False
        # A ReduceLROnPlateau with the interval `epoch` makes its step only after this hook. The
        # save is then left to the next hook.
        if not any(
            each.reduce_on_plateau and each.interval == "epoch"
            for each in trainer.lr_scheduler_configs
        ):
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, _module: Any) -> None:
        """Save, and wait until all saves are durable."""
        self._save(trainer, is_end=True)
        self._reporter.end()
        self._ckpt.wait()

    def on_validation_start(self, _trainer: Trainer, _module: Any) -> None:
        """Report that an evaluation runs."""
        self._reporter.enter("evaluate")

    def on_validation_end(self, _trainer: Trainer, _module: Any) -> None:
        """Report that the evaluation has ended."""
        self._reporter.leave()
        self._step_began_s = time.monotonic()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, _trainer: Trainer, _module: Any, _error: BaseException) -> None:
        """Restore the module's own `on_train_batch_end` after an error."""
        self._replaced.close()

    def _report(self, trainer: Trainer, outputs: Any) -> None:
        # Gradients are accumulated over batches: most batches complete no step.
        if trainer.global_step == self._reporter.step_reported:
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
    """Read checkpoints of `HoldfastCheckpoint`; read and write other files as Lightning does."""

    def __init__(self, saves: HoldfastCheckpoint) -> None:
        self._saves = saves

    def load_checkpoint(
        self, path: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Read the checkpoint at `path` in Lightning's form."""
        if str(path) == str(self._saves.folder):
            return self._saves.read()
        read: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        return read


def _state(trainer: Trainer, own: dict[str, Any]) -> dict[str, Any]:
    """Return the state that is equal on all ranks; put state that differs by rank into `own`."""
    lightning = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    own[_LOADERS] = lightning["loops"]["fit_loop"]["state_dict"].pop(_LOADERS, [])
    return {"model": lightning.pop(_WEIGHTS), "lightning": lightning}
