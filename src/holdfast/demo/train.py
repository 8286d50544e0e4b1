"""Train a small GPT on the standard library's source: an ordinary training script plus three lines.

    torchrun --nproc-per-node 2 -m holdfast.demo.train --checkpoints DIR
    holdfast run -- torchrun --nproc-per-node 2 -m holdfast.demo.train --checkpoints DIR

The three lines are marked. With the same seed and two ranks, the final weights are the same to the
last bit, however often the run was killed and restored. `--bad-batch` damages a batch of the data.
`--leave-out` skips some batches in the script itself, without Holdfast.
"""

import argparse
import gc
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported before there is a group, see `main`
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name in every PyTorch program
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.demo.corpus import VOCABULARY_SIZE, Sampler, load_corpus
from holdfast.demo.model import GPT, GPTConfig

BATCH_SIZE = 8  # windows of each rank
EVAL_BATCHES = 4  # batches of each rank
LEARNING_RATE = 2e-3
WARMUP_STEPS = 20
WEIGHT_DECAY = 0.1
MAX_GRADIENT_NORM = 1.0


class CorruptVocabulary(Exception):
    """A token is outside the vocabulary, so the data are damaged."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Join the other ranks, train, and exit so that no thread outlives the process group.

    A thread that outlives the group sometimes aborts a clean exit (SIGABRT, seen with gloo in torch
    2.13). Two things keep a group alive. One is a DDP module, which is deleted when `train`
    returns. The other is an import of torch.distributed.nn, whose functions have the current group
    as a default argument. So this module imports these functions before there is a group.
    """
    args = parse_arguments(arguments)
    rank, world_size = join_process_group()
    train(args, rank, world_size)
    gc.collect()
    dist.destroy_process_group()


def train(args: argparse.Namespace, rank: int, world_size: int) -> None:
    """Train as the arguments request, from the newest checkpoint if there is one."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(
        args.seed * world_size + rank
    )  # seeds the dropout; DDP gives all ranks rank 0's weights

    config = GPTConfig(vocabulary_size=VOCABULARY_SIZE)
    corpus = load_corpus()
    sampler = Sampler(
        corpus.train, batch_size=BATCH_SIZE, context=config.context, seed=args.seed, rank=rank
    )
    held_out = Sampler(
        corpus.validation, batch_size=BATCH_SIZE, context=config.context, seed=0, rank=rank
    )
    validation = [held_out.draw() for _ in range(EVAL_BATCHES)]

    model = GPT(config)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(
        parameter_groups(model), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, args.steps))

    run = holdfast.attach()  # Holdfast (1)
    ckpt = holdfast.Checkpointer(
        args.checkpoints, every=args.save_every, keep=args.keep
    )  # Holdfast (2)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    batches = run.batches(sampler)
    position = {"batches": batches}
    start = ckpt.restore(state, per_rank=position)
    numbered = ((batches.number, batch) for batch in batches)
    numbered = (one for one in numbered if not in_ranges(one[0], args.leave_out))
    say(f"corpus {corpus.sha256[:12]}, {world_size} ranks, from step {start} to {args.steps}")

    for step in range(start + 1, args.steps + 1):
        number, (inputs, targets) = next(numbered)
        if step == args.fail_at_step and rank == world_size - 1:
            inputs[3, 17] = 40_961  # the user's own error in the demonstration
        weight = math.nan if number == args.bad_batch and rank == world_size - 1 else 1.0
        check_vocabulary(inputs, step)
        loss = weight * F.cross_entropy(parallel(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types there
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        metrics = {"lr": float(schedule.get_last_lr()[0])}
        schedule.step()
        if step % args.eval_every == 0 or step == args.steps:
            with run.section("evaluate"):
                metrics["val_loss"] = evaluate(model, validation)

        run.step(step, loss=loss, **metrics)  # Holdfast (3)
        ckpt.save(step, state, per_rank=position)  # Holdfast (3), continued: the state of this step
        if step % 10 == 0 or "val_loss" in metrics:
            say(progress_line(step, loss.item(), **metrics))

    ckpt.close()
    say(f"done: weights {fingerprint(model)}")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT on the standard library's source."
    )
    parser.add_argument(
        "--checkpoints", type=Path, required=True, metavar="DIR", help="their folder"
    )
    parser.add_argument(
        "--steps", type=int, default=300, help="length of the run (default: %(default)s)"
    )
    parser.add_argument(
        "--save-every", type=int, default=20, metavar="STEPS", help="default: %(default)s"
    )
    parser.add_argument("--keep", type=int, default=3, metavar="N", help="newest checkpoints kept")
    parser.add_argument(
        "--eval-every", type=int, default=50, metavar="STEPS", help="default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, dropout and data order")
    parser.add_argument(
        "--fail-at-step", type=int, metavar="STEP", help="damage the last rank's data there"
    )
    parser.add_argument(
        "--bad-batch",
        type=int,
        metavar="NUMBER",
        help="a batch of the last rank whose weight is NaN",
    )
    parser.add_argument(
        "--leave-out",
        type=batch_ranges,
        default=(),
        metavar="FIRST-LAST,…",
        help="train without them",
    )
    args = parser.parse_args(arguments)
    for name in ("steps", "save_every", "keep", "eval_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}: give at least 1")
    if args.steps % args.save_every:
        parser.error(
            f"--steps {args.steps} is not a multiple of --save-every {args.save_every}: "
            "the last steps would not be in any checkpoint"
        )
    return args


def batch_ranges(text: str) -> list[tuple[int, int]]:
    """Parse ranges of batch numbers such as `119-122,300-301`, which include both ends."""
    ends = [part.partition("-") for part in text.split(",")]
    return [(int(first), int(last)) for first, _, last in ends]


def in_ranges(number: int, ranges: Sequence[tuple[int, int]]) -> bool:
    """Return True if a number is in one of the ranges, which include both ends."""
    return any(first <= number <= last for first, last in ranges)


def join_process_group() -> tuple[int, int]:
    """Join the process group; return the rank and the world size.

    A process that torchrun did not start forms a group of one.
    """
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not declared so
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


def parameter_groups(model: nn.Module) -> list[dict[str, object]]:
    """Return the optimizer's parameter groups.

    Weight decay applies to matrices, but not to biases and norms, which have one dimension.
    """
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def cosine(step: int, steps: int) -> float:
    """Return the factor on the learning rate after `step` steps.

    The factor rises linearly in the warm-up, then falls along half a cosine to a tenth.
    """
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def check_vocabulary(tokens: Tensor, step: int) -> None:
    """Check that each token has a row in the embedding.

    Raises:
        CorruptVocabulary: a token is outside the vocabulary.
    """
    largest = int(tokens.max())
    if largest >= VOCABULARY_SIZE:
        raise CorruptVocabulary(
            f"step {step}: token {largest} is outside the vocabulary of {VOCABULARY_SIZE} bytes"
        )


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the mean loss over all ranks' `batches`, in nats per byte.

    The function draws no random numbers, so that evaluations do not change the training.
    """
    model.eval()
    total = torch.zeros(())
    for inputs, targets in batches:
        total += F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    model.train()
    dist.all_reduce(total)
    return total.item() / (len(batches) * dist.get_world_size())


def say(line: str) -> None:
    """Print `line` on one rank only."""
    if dist.get_rank() == 0:
        print(line, flush=True)  # noqa: T201 - the log of a training script is what it prints


def progress_line(step: int, loss: float, *, lr: float, val_loss: float | None = None) -> str:
    """Return one line of the log, for example `step 120 loss 2.3145 lr 1.0e-03 val 2.41`."""
    return f"step {step} loss {loss:.4f} lr {lr:.1e}" + (
        "" if val_loss is None else f" val {val_loss:.2f}"
    )


def fingerprint(model: nn.Module) -> str:
    """Return a hash of the bytes of all weights, which changes if any bit changes."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
