"""The judge: what a process that knows nothing of the fault restores must be, bit for bit, the newest whole step."""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from checkpoint_faulting.state import blank, difference, per_rank_of, state_of
from holdfast.checkpoint import Checkpointer, scan, verify
from holdfast.checkpoint.catalog.lineage import LINE_NAME
from holdfast.checkpoint.catalog.writer_lease import WRITER_NAME
from holdfast.checkpoint.format.paths import step_path
from holdfast.core.errors import HoldfastError, NoVerifiedCheckpoint

Outcome = Literal["right", "silent", "stuck", "older", "crash", "executed", "left"]
"""As it must be; wrong bits, and nobody says so; nothing is restored though something could be; an older one than the
newest whole one; an error that is no sentence; something of a file has run; something is left over."""


@dataclass(frozen=True)
class Verdict:
    """What one fault led to; `detail` for whoever looks into it."""

    outcome: Outcome
    detail: str = ""

    @property
    def is_right(self) -> bool:
        """Whether all is as it must be."""
        return self.outcome == "right"


RIGHT = Verdict("right")


def judge(
    folder: Path,
    seed: int,
    *,
    world_size: int,
    attested: Collection[int],
    least: int | None,
    refused: Collection[int] = (),
    may_refuse: bool = False,
) -> Verdict:
    """Restore and compare.

    Args:
        folder: of the checkpoints.
        seed: of the run.
        world_size: of the ranks that saved; one restores.
        attested: the steps whose saves were begun: only their states may come back.
        least: the newest of them that is whole for certain; None: there may be none.
        refused: what must not be taken.
        may_refuse: an error that says what is wrong is right too, and so is passing over what only seems whole.
    """
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)
    state = blank(state_of(seed, min(attested)))
    own = blank(per_rank_of(seed, min(attested), 0)) if world_size == 1 else None
    try:
        with Checkpointer(folder) as ckpt:
            step = ckpt.restore(state, per_rank=own)
    except HoldfastError as error:
        if not is_sentence(str(error)):
            return Verdict("crash", f"not a sentence: {error}")
        refusing = may_refuse or (least is None and isinstance(error, NoVerifiedCheckpoint))
        return RIGHT if refusing else Verdict("stuck", str(error))
    except Exception as error:
        return Verdict("crash", f"{type(error).__name__}: {error}")
    if step not in attested or step in refused:
        return Verdict("silent", f"step {step} was restored")
    differs = difference(state, state_of(seed, step)) or (
        own and difference(own, per_rank_of(seed, step, 0))
    )
    if differs:
        return Verdict("silent", f"{differs} of step {step} is wrong")
    newer = [info.step for info in scan(folder) if info.step > step and info.step not in refused]
    whole = [each for each in newer if verify(step_path(folder, each)).state == "verified"]
    if (whole and not may_refuse) or (least is not None and step < least):
        return Verdict(
            "older", f"step {step} was restored; {least} should be whole, and {whole} verify"
        )
    return RIGHT


def is_sentence(text: str) -> bool:
    """Whether an error is told in words, on a line."""
    return "\n" not in text and "Traceback" not in text and text.rstrip(")").endswith(".")


def leftovers(folder: Path) -> list[str]:
    """Names beside those of checkpoints, of the writer and of the line."""
    names = {path.name for path in folder.iterdir()} - {WRITER_NAME, LINE_NAME}
    return [name for name in names if not name.startswith("step-") or "." in name]
