"""Save and resume exactly in `transformers.Trainer`, by a callback.

    saves = HoldfastCallback(DIR, every=100)
    trainer = Trainer(model, TrainingArguments(..., save_strategy="no"), callbacks=[saves], ...)
    trainer.train(resume_from_checkpoint=saves.resume(trainer))

Saves run in the background, and a restore verifies every byte. A Trainer resumes from a folder. It
reads the step, which determines its position in the epoch, and then the weights. So `resume` first
restores the model from the newest checkpoint. Then it makes a temporary folder with the step and an
empty weights file, since the model is already restored. The position in the data is part of the
saved state, see `huggingface_data`.

The state after a step is complete once the step is logged and evaluated. The first event after that
is the start of the next step or of the next epoch, and the state is saved in this event. The random
generators must be restored in the same event, because they have different states in the two: before
a step, the step's batch is already drawn; before an epoch, its order is not drawn yet.
"""

import json
import logging
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from holdfast.checkpoint import Checkpointer, outlive_sigterm
from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.integrations import missing
from holdfast.checkpoint.integrations.generators import Generators
from holdfast.checkpoint.integrations.reporting import Reporter
from holdfast.checkpoint.schedule.data_workers import replaced
from holdfast.core.errors import BadUse
from holdfast.core.left_out import LeftOut
from holdfast.core.link import accumulation

try:
    from safetensors.torch import save_file
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import SaveStrategy
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

    from holdfast.checkpoint.integrations.huggingface_data import TrainerData
except ImportError as error:
    raise missing(error, "huggingface") from error

_WEIGHTS_NAME: Final = "held-by-holdfast.safetensors"
_POSITION: Final = "position_in_the_data"
"""The key of the position in the data, within the saved state of the Trainer."""
_SAMPLING: Final = ("random", "sequential")
"""The sampling strategies whose order depends only on the seed and the epoch."""
_logger = logging.getLogger("holdfast")


class HoldfastCallback(TrainerCallback):
    """Save and resume model, optimizer, scheduler, Trainer state and random generators."""

    def __init__(self, dir: str | os.PathLike[str], **options: Any) -> None:  # noqa: A002 - as of Checkpointer
        """Create the callback with options of `holdfast.Checkpointer`.

        `every` counts steps of the optimizer.

        Raises:
            BadUse: an argument is not allowed, or `dir` is not writable.
        """
        self._ckpt = Checkpointer(dir, **options)
        self._sigterm_grace_s: float | None = options.get("sigterm_grace_s")
        self._trainer: Trainer | None = None
        self._resumed: _Resumed | None = None
        self._data: TrainerData | None = None
        self._passed = 0
        """The number of batches that the Trainer skips in the first epoch."""
        self._accumulates: TrainingArguments | None = None
        """The arguments whose gradient accumulation was adapted to the number of ranks."""
        self._generators = Generators()
        self._saved_step = 0
        self._has_saved_end = False
        self._replaced = ExitStack()
        self._reporter = Reporter()
        self._step_began_s = 0.0
        self._tokens = 0
        self._speed: dict[str, float] = {}

    def resume(self, trainer: Trainer) -> str | None:
        """Restore the newest checkpoint that verifies. Collective.

        This call restores the weights into the trainer's model. The rest of the state is restored
        when training begins. On fewer nodes than usual, this call also makes the trainer accumulate
        more gradients, so that a step has the same number of samples.

        Returns:
            The value to pass as `resume_from_checkpoint`; None if there is no checkpoint.

        Raises:
            BadUse: this trainer cannot be resumed exactly. The message names the setting to change.
            NoVerifiedCheckpoint: there are checkpoints, but none verifies.
            StateMismatch: the model does not fit the checkpoint.
        """
        _check(trainer)
        self._trainer = trainer
        if self._accumulates is not trainer.args:  # a second call must not multiply again
            self._accumulates = trainer.args
            trainer.args.gradient_accumulation_steps *= accumulation()
        state: dict[str, Any] = {
            "model": trainer.model,
            **dict.fromkeys((*_parts(trainer), "trainer")),
        }
        if not self._generators.restore(self._ckpt, state):
            return None
        self._resumed = _Resumed(state)
        return self._resumed.folder.name

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the state that `resume` has not restored, if training resumes."""
        if self._trainer is None:
            raise BadUse(
                "Pass resume_from_checkpoint=saves.resume(trainer) to train(), also where "
                "nothing is saved yet."
            )
        self._replaced.close()  # undo replacements that an interrupted training left
        self._saved_step = state.global_step
        self._has_saved_end = False
        self._reporter.begin(state.global_step)
        loader = kwargs.get("train_dataloader")
        # accelerate wraps the loader that starts the workers.
        loader = getattr(loader, "base_dataloader", loader)
        if self._sigterm_grace_s is not None and loader is not None:
            loader.worker_init_fn = outlive_sigterm(
                self._sigterm_grace_s, getattr(loader, "worker_init_fn", None)
            )
        resumed, self._resumed = self._resumed, None
        self._find_place(kwargs.get("train_dataloader"), state, resumed)
        if resumed is None:
            return
        resumed.folder.cleanup()
        if not state.global_step:
            raise BadUse(
                "There is a checkpoint, but training starts over. Pass the result of resume() to "
                "train()."
            )
        if self._trainer.model is not resumed.state["model"]:
            raise BadUse(
                "The trainer's model was replaced after resume(). Call resume() once the "
                "model is final."
            )
        for name, part in _parts(self._trainer).items():
            part.load_state_dict(resumed.state[name])
        if state.global_step >= state.max_steps:
            # A Trainer tests for its end only after a step, and would train one step too many.
            control.should_training_stop = True
            no_batches = replaced(self._trainer, "get_batch_samples", lambda *_: ([], None))
            self._replaced.enter_context(no_batches)

    def _find_place(self, loader: Any, state: TrainerState, resumed: "_Resumed | None") -> None:
        """Wrap the loader to leave batches out, and continue at the saved position."""
        assert self._trainer is not None, "it was passed to resume"
        left_out, args = LeftOut.of_environment(), self._trainer.args
        self._data = TrainerData.put_into(loader, left_out=left_out, accumulation=accumulation())
        self._passed = 0
        if self._data is None:
            if left_out.ranges:
                _logger.warning(
                    "Batches %s are not left out: the data are a stream, or one rank reads them "
                    "for all. Leave their samples out in the dataset.",
                    left_out.as_text(),
                )
        elif resumed is not None:
            passed = self._data.go_on(
                resumed.position,
                step=state.global_step,
                accumulation_steps=args.gradient_accumulation_steps,
            )
            self._passed = 0 if args.ignore_data_skip else passed

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """At the start of an epoch, restore the generators if training resumes here, and save."""
        self._reporter.leave()
        # If the state was saved within an epoch, `on_step_begin` restores the generators instead.
        if state.epoch is None or state.epoch == int(state.epoch):
            self._generators.put_back()
        self._save(state)
        if self._data is not None:
            self._data.begin_epoch(passed=self._passed)
            self._passed = 0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """At the start of a step, restore the generators if training resumes here, and save."""
        self._reporter.step(state.global_step)  # report a step that was due to log but did not
        self._reporter.leave()
        self._generators.put_back()
        self._save(state)
        self._step_began_s, self._tokens = time.monotonic(), state.num_input_tokens_seen

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report the step, and begin an evaluation if one follows.

        If the step will be logged, `on_log` reports the step with its loss instead.
        """
        step_s = max(time.monotonic() - self._step_began_s, 1e-9)
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._speed = {"samples_per_second": samples / step_s}
        if self._data is not None and self._trainer is not None:
            self._data.took(self._trainer.current_gradient_accumulation_steps)
        if state.num_input_tokens_seen > self._tokens:
            self._speed["tokens_per_second"] = (state.num_input_tokens_seen - self._tokens) / step_s
        if not control.should_log:
            self._reporter.step(state.global_step, **self._speed)
        if control.should_evaluate:
            self._reporter.enter("evaluate")

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report the step with its loss and other logged values."""
        logs = kwargs.get("logs") or {}
        if "loss" in logs:
            shown = {name: logs.get(name) for name in ("grad_norm", "learning_rate")}
            self._reporter.step(state.global_step, loss=logs["loss"], **self._speed, **shown)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report that an evaluation runs, even one that the script itself has called."""
        self._reporter.enter("evaluate")

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report that the evaluation has ended."""
        self._reporter.leave()

    def on_predict(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Any,
        **kwargs: Any,
    ) -> None:
        """Report that the prediction has ended."""
        self._reporter.leave()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save after the last step of training, before the Trainer may load the best weights."""
        self._reporter.step(state.global_step, **self._speed)
        if control.should_evaluate:
            self._reporter.enter("evaluate")
        if control.should_training_stop:
            self._save(state, is_end=True)
            self._has_saved_end = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save if the training ended with an evaluation, and wait until all saves are durable."""
        self._replaced.close()
        if not self._has_saved_end:
            self._save(state, is_end=True)
        self._reporter.end()
        self._ckpt.wait()

    def _save(self, state: TrainerState, *, is_end: bool = False) -> None:
        if state.global_step > self._saved_step or (is_end and state.global_step):
            self._saved_step = state.global_step
            self._ckpt.save(state.global_step, self._state, force=is_end)

    def _state(self) -> dict[str, Any]:
        trainer = self._trainer
        assert trainer is not None, "it was passed to resume"
        trainer.store_flos()
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        exported: list[Any] = [each for each in callbacks if isinstance(each, ExportableState)]
        noted = TrainerState(stateful_callbacks=exported).stateful_callbacks
        described = asdict(replace(trainer.state, stateful_callbacks=noted))
        if self._data is not None:
            described[_POSITION] = self._data.state()
        # The Trainer's state is saved as one text. As separate values, each new log entry would
        # change the shape of the state, so every save would make a new plan.
        return {
            "model": trainer.model,
            **_parts(trainer),
            "trainer": json.dumps(described, sort_keys=True),
        }


class _Resumed:
    """Hold the state that `resume` has read, and the folder that the Trainer resumes from."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self.folder = tempfile.TemporaryDirectory(prefix="holdfast-resume-")
        folder = Path(self.folder.name)
        described = json.loads(state["trainer"])
        self.position: dict[str, Any] | None = described.pop(_POSITION, None)
        (folder / TRAINER_STATE_NAME).write_text(json.dumps(described, sort_keys=True))
        names = dict.fromkeys(state["model"].state_dict(), _WEIGHTS_NAME)
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(
            json.dumps({"metadata": {}, "weight_map": names})
        )
        save_file({}, folder / _WEIGHTS_NAME)


def _parts(trainer: Trainer) -> dict[str, Any]:
    """Return the parts of the training that have a state, apart from the model.

    Before training begins, the optimizer and the scheduler may be None.
    """
    parts = {
        "optimizer": trainer.optimizer,
        "scheduler": trainer.lr_scheduler,
        "scaler": trainer.accelerator.scaler,
    }
    if parts["scaler"] is None:
        del parts["scaler"]
    return parts


def _check(trainer: Trainer) -> None:
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise BadUse(
            "HoldfastCallback saves only state that is the same on all ranks. For FSDP2, see examples/fsdp2.py."
        )
    if hasattr(trainer.model, "peft_config"):
        raise BadUse(
            "HoldfastCallback does not resume adapters of PEFT. Save them with a loop of your own."
        )
    if getattr(trainer, "model_init", None):  # train() would replace the restored model
        raise BadUse(
            "HoldfastCallback does not resume a model that model_init makes. Pass the Trainer "
            "the model itself."
        )
    if getattr(trainer.args, "group_by_length", False):  # a setting of older transformers
        raise BadUse(
            "The order of group_by_length cannot be restored within an epoch. Leave it out."
        )
    sampling = getattr(trainer.args, "train_sampling_strategy", "random")
    if sampling not in _SAMPLING:
        raise BadUse(
            f"train_sampling_strategy is {sampling!r}, whose order cannot be restored within an "
            f"epoch. Set one of {', '.join(_SAMPLING)}."
        )
    if sampling == "random" and not trainer.accelerator.use_seedable_sampler:
        raise BadUse(
            "use_seedable_sampler is off, so the order of an epoch cannot be restored. "
            "Leave it on in accelerator_config."
        )
    if trainer.args.auto_find_batch_size:  # the restarted training would not be restored
        raise BadUse(
            "auto_find_batch_size restarts the training if memory runs out. Set the batch "
            "size instead."
        )
    if trainer.args.save_strategy != SaveStrategy.NO:
        strategy = SaveStrategy(trainer.args.save_strategy).value
        raise BadUse(
            f"save_strategy is {strategy!r}, which blocks at every save. Set it to 'no': Holdfast "
            "saves."
        )
    callbacks = trainer.callback_handler.callbacks
    begun_anew = {type(each).__name__ for each in callbacks if isinstance(each, ExportableState)}
    if (
        begun_anew
        and not trainer.args.restore_callback_states_from_checkpoint
        and Ranks().rank == 0
    ):
        _logger.warning(
            "%s will lose its state when training is resumed. Set "
            "restore_callback_states_from_checkpoint=True.",
            ", ".join(sorted(begun_anew)),
        )
