"""Report an evaluation, for people and for the harness's tools.

The inputs are an `Evaluation` and its timeline; the results are tables, files and a page.

| module | one idea |
|---|---|
| `occupation` | the activity of each engine, slice by slice |
| `table` | the scores, with the harness's own columns |
| `results` | the harness's own files |
| `why` | the bound, and the use of the engine-seconds, as text |
| `gantt` | engines over time as SVG |
| `view`, `page` | one page with everything |
| `compare` | scores over checkpoints |
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
    """Write an evaluation's page into its folder, and lm-eval's own files; return the page.

    lm-eval's files go into the folder, or below `output`. The page has the difference of each score
    to `previous`, the evaluation of the last checkpoint.

    Raises:
        HoldfastError: a package for the page is not installed.
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
