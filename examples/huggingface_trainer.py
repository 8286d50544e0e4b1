"""Hugging Face's Trainer with a small language model made here; saves go on beside the training.

python examples/huggingface_trainer.py --checkpoints /tmp/huggingface
"""

import argparse

import torch
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from holdfast.checkpoint.integrations.huggingface_trainer import HoldfastCallback
from holdfast.demo.corpus import load_corpus

CONTEXT = 32


def windows() -> TensorDataset:
    """The text in pieces of 32 bytes."""
    return TensorDataset(load_corpus().train[: CONTEXT * 2048].long().view(-1, CONTEXT))


def collate(pieces: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A model of transformers predicts each next byte by itself."""
    tokens = torch.stack([piece for (piece,) in pieces])
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    args = parser.parse_args()

    torch.set_num_threads(1)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    saves = HoldfastCallback(args.checkpoints, every=args.save_every, keep=3)  # Holdfast (1)
    trainer = Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            output_dir=args.checkpoints,
            max_steps=args.steps,
            learning_rate=3e-3,
            per_device_train_batch_size=8,
            logging_steps=10,
            save_strategy="no",  # Holdfast saves
            use_cpu=True,
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=windows(),
        data_collator=collate,
        callbacks=[saves],  # Holdfast (2)
    )
    trainer.train(resume_from_checkpoint=saves.resume(trainer))  # Holdfast (3)


if __name__ == "__main__":
    main()
