"""Report an evaluation, for people and for the harness's own tools.

The inputs are an `Evaluation` and its timeline; the results are tables, files and a page.

| module | one idea |
|---|---|
| `occupation` | the activity of each engine in slices of time |
| `table` | the scores, with the harness's own columns |
| `results` | the harness's own files |
| `why` | the lower bound and the account of the engine-seconds, as text |
| `gantt` | engines over time as SVG |
| `view`, `page` | one page with everything |
| `compare` | scores over several checkpoints |
"""

from pathlib import Path

from holdfast.core.ledger import EvaluationRecord
from holdfast.evaluate.types.evaluation import Evaluation


def write_reports(
    evaluation: Evaluation,
    output: Path | None = None,
    *,
    previous: EvaluationRecord | None = None,
) -> Path:
    """Write an evaluation's page into its folder, and the harness's own files; return the page.

    The harness's files are written into `output`, or into the evaluation's folder. If `previous` is
    given, which is the evaluation of the last checkpoint, the page shows the difference of each
    score to it.

    Raises:
        HoldfastError: a package that the page needs is not installed.
        OSError: a file could not be written.
    """
    from holdfast.evaluate.report.page import write_page
    from holdfast.evaluate.report.results import write_results
    from holdfast.evaluate.types.timeline import read_timeline

    folder = Path(evaluation.folder)
    write_results(evaluation, output or folder / "lm-eval")
    page = folder / "report.html"
    write_page(page, evaluation, read_timeline(folder / "timeline.jsonl"), previous=previous)
    return page
