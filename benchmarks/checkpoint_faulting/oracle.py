"""Judge a restore after a fault: bit for bit, it must be the newest whole step."""

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
"""The result of one fault.

`right`: as it must be. `silent`: wrong bits without an error. `stuck`: nothing is restored although
a step could be. `older`: an older step than the newest whole one. `crash`: an error that is no
sentence. `executed`: code of a file has run. `left`: files or processes are left over.
"""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one fault; `detail` is for its investigation."""

    outcome: Outcome
    detail: str = ""

    @property
    def is_right(self) -> bool:
        """True for the right outcome."""
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
        folder: the folder of the checkpoints.
        seed: the seed of the run.
        world_size: the number of ranks that saved; one rank restores.
        attested: the steps whose saves began: only their states may come back.
        least: the newest of these steps that is certainly whole; None: there may be none.
        refused: the steps that must not be restored.
        may_refuse: an error in words is right too, and so is skipping a step that only seems whole.
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
    """Return True if an error is one line that ends as a sentence."""
    return "\n" not in text and "Traceback" not in text and text.rstrip(")").endswith(".")


def leftovers(folder: Path) -> list[str]:
    """Return the names besides those of checkpoints, of the writer and of the lineage."""
    names = {path.name for path in folder.iterdir()} - {WRITER_NAME, LINE_NAME}
    return [name for name in names if not name.startswith("step-") or "." in name]
