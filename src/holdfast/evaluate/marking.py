"""What an evaluation leaves in the marks of a checkpoint of Holdfast's: that it is needed meanwhile, and its scores.

So that `Checkpointer(keep=…)` and `prune` delete none that is being read, and `prune --best` finds the best. Marks
advise: where they cannot be written, it is evaluated all the same.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from holdfast.checkpoint.manifest import MANIFEST_NAME
from holdfast.checkpoint.marks import note_metrics, release, want
from holdfast.core.errors import HoldfastError
from holdfast.evaluate.evaluation import Evaluation
from holdfast.evaluate.scores import Score

_WANTED_FOR_S: Final = 24 * 3600.0
"""Where nobody is left to release it."""
_log = logging.getLogger(__name__)


@contextmanager
def wanted(model: str, evaluation_id: str) -> Iterator[None]:
    """No policy deletes the checkpoint while the block runs, if `model` is one."""
    checkpoint = Path(model)
    if not (checkpoint / MANIFEST_NAME).is_file():
        yield
        return
    now_s = time.time()
    with _logged(f"{checkpoint} may be deleted while it is evaluated"):
        want(checkpoint, evaluation_id, now_s=now_s, until_s=now_s + _WANTED_FOR_S)
    try:
        yield
    finally:
        with _logged(f"{checkpoint} stays for up to a day, as it was evaluated"):
            release(checkpoint, evaluation_id, now_s=time.time())


def note_scores(evaluation: Evaluation) -> None:
    """Note the scores of tasks and groups as metrics of the checkpoint, if the model is one: `TASK/METRIC[,FILTER]`."""
    checkpoint = Path(evaluation.model)
    metrics = {_name(one): one.number for one in evaluation.scores if one.depth == 0 and one.number is not None}
    if metrics and (checkpoint / MANIFEST_NAME).is_file():
        with _logged(f"The scores of {checkpoint} are not in its marks"):
            note_metrics(checkpoint, metrics, now_s=time.time())


def _name(score: Score) -> str:
    return f"{score.task}/{score.metric}" + (f",{score.filter}" if score.filter not in ("", "none") else "")


@contextmanager
def _logged(what: str) -> Iterator[None]:
    try:
        yield
    except (HoldfastError, OSError) as error:
        _log.warning("%s: %s", what, error)
