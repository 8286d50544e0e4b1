"""Annotate a Holdfast checkpoint: hold it while it is evaluated, and record its scores.

The hold prevents `Checkpointer(keep=…)` and `prune` from deleting the checkpoint. `prune --best`
reads the scores. The evaluation continues if the annotations cannot be written.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.checkpoint import MANIFEST_NAME, held_for_reading, inspect_checkpoint, note_metrics
from holdfast.core.errors import HoldfastError
from holdfast.evaluate.types.evaluation import Evaluation
from holdfast.evaluate.types.scores import Score
from holdfast.evaluate.types.suite import Suite

_log = logging.getLogger(__name__)


@contextmanager
def wanted(model: str, evaluation_id: str) -> Iterator[None]:
    """Prevent the deletion of a checkpoint during a `with` block, for at most one day."""
    checkpoint = Path(model)
    if not (checkpoint / MANIFEST_NAME).is_file():
        yield
        return
    with held_for_reading(checkpoint, evaluation_id):
        yield


def note_scores(evaluation: Evaluation, suite: Suite) -> None:
    """Record the scores of tasks and groups as metrics of the checkpoint.

    Does nothing if the model is not a Holdfast checkpoint. The names are `TASK/METRIC`, or
    `TASK/METRIC,FILTER` with a filter. With a limit on samples they start with `TASK:LIMIT`, so
    that retention does not mistake the score of some samples for the score of all.
    """
    checkpoint = Path(evaluation.model)
    metrics = dict(_metrics(evaluation.scores, suite))
    if not metrics or not (checkpoint / MANIFEST_NAME).is_file():
        return

    def was_evaluated() -> bool:
        """Return False if this step's checkpoint was saved again after the evaluation started."""
        return (inspect_checkpoint(checkpoint).created_at_s or 0.0) <= evaluation.started_at_s

    try:
        note_metrics(checkpoint, metrics, now_s=time.time(), still=was_evaluated)
    except (HoldfastError, OSError) as error:
        _log.warning("The scores of %s are not in its marks: %s", checkpoint, error)


def _metrics(scores: Iterable[Score], suite: Suite) -> Iterator[tuple[str, float]]:
    limits = {entry.name: entry.limit for entry in suite.entries}
    for score in scores:
        known = {limits[score.task]} if score.task in limits else set(limits.values())
        # A task inside an entry has no known limit.
        if score.depth or score.number is None or len(known) > 1:
            continue
        (limit,) = known
        task = score.task if limit is None else f"{score.task}:{limit:g}"
        named = score.metric if score.filter in ("", "none") else f"{score.metric},{score.filter}"
        yield f"{task}/{named}", score.number
