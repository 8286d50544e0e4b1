"""What an evaluation came to, for people and for the harness's tools.

An `Evaluation` and its timeline enter; tables, files and a page leave.

| module | one idea |
|---|---|
| `occupation` | what each engine was occupied with, slice by slice |
| `table` | the scores, with the harness's own columns |
| `results` | the harness's own files |
| `why` | the bound, and where the engine-seconds went, as text |
| `gantt` | engines over time as SVG |
| `view`, `page` | one page of it all |
| `compare` | scores over checkpoints |
"""

from pathlib import Path

from holdfast.evaluate.types.evaluation import Evaluation


def write_reports(evaluation: Evaluation, output: Path | None = None) -> Path:
    """Write an evaluation's page into its folder, and lm-eval's own files into it or below `output`; returns the page.

    Raises:
        HoldfastError: a package of the page is not installed.
        OSError: a file could not be written.
    """
    from holdfast.evaluate.report.page import write_page
    from holdfast.evaluate.report.results import write_results
    from holdfast.evaluate.types.timeline import read_timeline

    folder = Path(evaluation.folder)
    write_results(evaluation, output or folder / "lm-eval")
    page = folder / "report.html"
    write_page(page, evaluation, read_timeline(folder / "timeline.jsonl"))
    return page
