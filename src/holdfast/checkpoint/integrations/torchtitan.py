"""Replace torchtitan's checkpoint manager by one with the same interface and settings.

    config.checkpoint = HoldfastCheckpointManager.Config(enable=True, folder="checkpoint",
    interval=500)

The names in a checkpoint are the same as torchtitan's. So torchtitan's manager can load such a
checkpoint by `initial_load_path`, and this manager can resume from a folder that torchtitan's
manager wrote. All other saves and loads (initial weights, a last save of only the model, Hugging
Face's format) are done by torchtitan's own code.
"""

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from holdfast.checkpoint import Checkpointer, SaveHandle, scan
from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.format.manifest import Save
from holdfast.checkpoint.format.paths import step_path
from holdfast.checkpoint.integrations import missing
from holdfast.checkpoint.integrations.reporting import Reporter
from holdfast.checkpoint.restore.load import restore_into
from holdfast.checkpoint.restore.open import open_together
from holdfast.core.errors import DamagedCheckpoint

try:
    from torchtitan.components.checkpointer import MODEL, CheckpointManager
except ImportError as error:
    raise missing(error, "torchtitan") from error

_CONTENTS: Final = (".metadata", "model.safetensors.index.json")


class HoldfastCheckpointManager(CheckpointManager):
    """Save in the background; restore the newest checkpoint that verifies, and the generators."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """Accept torchtitan's settings; `async_mode` is ignored: every save is asynchronous."""

    def __init__(self, config: Config, **parts: Any) -> None:
        """Create the manager with the arguments that torchtitan passes to a checkpoint manager.

        Raises:
            BadUse: the folder is not writable.
        """
        # Disable torchtitan's thread that deletes old checkpoints, since it ignores manifests.
        super().__init__(replace(config, async_mode="disabled", keep_latest_k=0), **parts)  # type: ignore[call-arg]
        if self.enable:
            self._ckpt = Checkpointer(
                self.folder, every=config.interval, keep=config.keep_latest_k or None
            )
        self._reporter = Reporter()
        self._losses: dict[int, float] = {}
        self._tokens: int | None = None
        self._step_ended_s = 0.0

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self._report(curr_step)
        if self.load_only:
            return False
        if last_step and self.last_save_model_only:
            self._ckpt.wait()
            self._save_last_step(curr_step)
            return True
        # Call `save` at every step, since `save` decides whether one is due, and detects a request
        # to stop.
        is_first_or_last = bool(curr_step % self.interval) and self._should_save(
            curr_step, last_step
        )
        handle = self._ckpt.save(curr_step, self._flattened_model_states_sd, force=is_first_or_last)
        self.save_future: SaveHandle | None = handle
        return handle.step is not None

    def _watch(self) -> None:
        """Report the trainer's loss, speed and validation from now on."""
        self._reporter.begin(0)
        trainer = self.states.get("train_state")
        processor, validator = (
            getattr(trainer, name, None) for name in ("metrics_processor", "validator")
        )
        if processor is not None:
            log = processor.log

            def log_and_note(step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
                self._losses[step] = global_avg_loss
                log(step, global_avg_loss, *args, **kwargs)

            processor.log = log_and_note
        if validator is not None:
            validate = validator.validate

            def validate_in_section(*args: Any, **kwargs: Any) -> Any:
                self._reporter.enter("evaluate")
                try:
                    return validate(*args, **kwargs)
                finally:
                    self._reporter.leave()
                    self._step_ended_s = time.monotonic()

            validator.validate = validate_in_section

    def _report(self, step: int) -> None:
        tokens, now_s = (
            getattr(self.states.get("train_state"), "ntokens_seen", None),
            time.monotonic(),
        )
        rate = None
        if tokens is not None and self._tokens is not None:
            rate = (tokens - self._tokens) / max(now_s - self._step_ended_s, 1e-9)
        self._tokens, self._step_ended_s = tokens, now_s
        loss = self._losses.pop(step, None)
        self._reporter.step(step, loss=loss, tokens_per_second=rate)

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        self._watch()
        ranks = Ranks()
        steps = ranks.first(lambda: [info.step for info in scan(self.folder)])
        if step not in steps and (step != -1 or not steps):
            loaded: bool = super()._load(step)
            return loaded
        # As in torchtitan, only the model is loaded from a checkpoint of step 0, which is a seed.
        is_seed = (steps[0] if step == -1 else step) == 0
        states = self._states_to_load(model_only=is_seed)
        if step == -1 and not is_seed:
            self._ckpt.restore(states)
        else:
            self._restore(ranks, max(step, 0), states)
        self.states[MODEL].load_state_dict(states)
        return True

    def _restore(self, ranks: Ranks, step: int, states: dict[str, Any]) -> None:
        path = step_path(Path(self.folder).absolute(), step)
        opened, reason, _digest = open_together(ranks, path, step)
        if opened is not None:
            reason = restore_into(ranks, opened, states, None)
            self._ckpt._engine.descends_from(Save(step=step, save=opened.manifest.save))
        if reason:
            raise DamagedCheckpoint(
                f"{path} is damaged: {reason}. Leave load_step out to take the newest that is "
                "whole."
            )

    def _find_load_step(self, folder: str = "") -> int:
        # torchtitan's own method would also find checkpoints whose save has not ended.
        places = (
            at.parent.name
            for name in _CONTENTS
            for at in Path(folder or self.folder).glob(f"step-*/{name}")
        )
        steps = (re.fullmatch(r"step-(\d+)", place) for place in places)
        return max((int(step[1]) for step in steps if step), default=-1)

    def _maybe_wait_for_staging(self) -> None:
        self._ckpt.before_update()

    def _wait_for_saving(self) -> None:
        if self.save_future is not None:
            self.save_future.result()
        self.save_future = None

    def _close(self) -> None:
        super()._close()
        # torchtitan also calls this method if the constructor failed.
        if hasattr(self, "_ckpt"):
            self._ckpt.close()
