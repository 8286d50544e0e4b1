"""Have two real ranks disagree about the step to save."""

import random
from pathlib import Path
from typing import Final

import torch

from checkpoint_faulting.ground import run_ranks
from checkpoint_faulting.oracle import RIGHT, Verdict, is_sentence
from holdfast.checkpoint import Checkpointer
from holdfast.core.errors import BadUse

KIND: Final = "a rank that disagrees about the step"
AGREED_EVERY: Final = 4


def disagree(folder: Path, seed: int, count: int) -> list[Verdict]:
    """Have both ranks save `count` times, mostly at different steps and sometimes at the same."""
    folder.mkdir(parents=True)
    answers = [rank.answer() for rank in run_ranks(2, _save, folder, seed, count)]
    return [left if not left.is_right else right for left, right in zip(*answers, strict=True)]


def _save(rank: int, _world_size: int, folder: Path, seed: int, count: int) -> list[Verdict]:
    chance, verdicts = random.Random(seed), []
    with Checkpointer(folder, keep=None) as ckpt:
        step, agreed = 1, 0
        for number in range(count):
            if number % AGREED_EVERY == 0:
                step, agreed = step + 10, step + 10
                ckpt.save(agreed, _state(agreed), per_rank={"rank": rank}).result()
            off = chance.choice((-3, -1, 1, 2, 7)) * chance.choice((0, 1, 1)) or 5
            verdicts.append(_disagree_once(ckpt, agreed + 3 + off * rank, agreed, rank))
    return verdicts


def _disagree_once(ckpt: Checkpointer, step: int, agreed: int, rank: int) -> Verdict:
    try:
        ckpt.save(step, _state(step), per_rank={"rank": rank}).result()
    except BadUse as error:
        if not is_sentence(str(error)) or "make different calls" not in str(error):
            return Verdict("crash", str(error))
    else:
        return Verdict("silent", f"rank {rank} has saved step {step}")
    found = {"a": torch.zeros(1000), "n": 0}
    own = {"rank": -1}
    if ckpt.restore(found, per_rank=own) != agreed:
        return Verdict("older", f"step {agreed} was the last one saved")
    if not torch.equal(found["a"], _state(agreed)["a"]) or (found["n"], own["rank"]) != (
        agreed,
        rank,
    ):
        return Verdict("silent", f"step {agreed} is wrong")
    return RIGHT


def _state(step: int) -> dict[str, object]:
    return {"a": torch.arange(1000.0) * step, "n": step}
