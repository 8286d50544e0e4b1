"""A Trainer that draws many random numbers, and may kill its process."""

import os
import signal

import torch
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from holdfast.checkpoint.integrations.huggingface_trainer import HoldfastCallback

STEPS = 9
STEPS_AN_EPOCH = 4


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 4 * STEPS_AN_EPOCH - 1

    def __getitem__(self, index):
        tokens = torch.arange(index, index + 6) % 32
        return {"input_ids": tokens, "labels": tokens}


class DiesAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Breaks(TrainerCallback):
    def on_epoch_end(self, args, state, control, **kwargs):
        raise RuntimeError("it broke")


class Unimproved(TrainerCallback):
    """Report a metric that never improves."""

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_loss"] = 1.0


class StopsOnceItIsEvaluated(TrainerCallback):
    def on_evaluate(self, args, state, control, **kwargs):
        control.should_training_stop = True


def make(folder, *, seed=0, callbacks=(), first=(), patience=50, saving=None, **options):
    """Return a trainer and its callback; only the weights depend on `seed`."""
    set_seed(seed)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.2,
    )
    saves = HoldfastCallback(folder, **{"every": 1, "keep": None, **(saving or {})})
    arguments = TrainingArguments(
        output_dir=str(folder),
        **{
            "max_steps": STEPS,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine",
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "metric_for_best_model": "loss",
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
            "report_to": "none",
            **options,
        },
    )
    trainer = Trainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=Text(),
        eval_dataset=Text(),
        callbacks=[*first, saves, EarlyStoppingCallback(patience), *callbacks],
    )
    return trainer, saves


def train(folder, **options):
    trainer, saves = make(folder, **options)
    trainer.train(resume_from_checkpoint=saves.resume(trainer))
    return trainer
