"""Render and write an evaluation's page, which needs no network and runs no script."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from holdfast.core import page
from holdfast.core.ledger import EvaluationRecord
from holdfast.evaluate.report.results import SAMPLES
from holdfast.evaluate.types.evaluation import Evaluation
from holdfast.evaluate.types.timeline import Timeline

TEMPLATE = Path(__file__).parent / "templates" / "evaluation.html.j2"


def write_page(
    path: Path,
    evaluation: Evaluation,
    timeline: Timeline,
    *,
    previous: EvaluationRecord | None = None,
) -> None:
    """Write the page of an evaluation; equal inputs give equal bytes.

    Args:
        path: the path of the page; links to samples are relative to the page's folder.
        evaluation: the evaluation.
        timeline: the times of requests, metrics and engines.
        previous: the evaluation of the last checkpoint, from which the difference of each score is
            computed.

    Raises:
        HoldfastError: jinja2 or numpy is not installed.
        OSError: the page could not be written; an earlier page at `path` is untouched.
    """
    samples = samples_of(path.parent)
    page.write_page(path, render(evaluation, timeline, previous=previous, samples=samples))


def samples_of(folder: Path) -> dict[str, str]:
    """Return the path of each task's logged samples, relative to `folder`."""
    found = sorted((folder / SAMPLES).rglob("samples_*.jsonl"))
    return {
        path.name.removeprefix("samples_").rpartition("_")[0]: quote(
            path.relative_to(folder).as_posix()
        )
        for path in found
    }


def render(
    evaluation: Evaluation,
    timeline: Timeline,
    *,
    previous: EvaluationRecord | None = None,
    samples: Mapping[str, str] | None = None,
) -> str:
    """Return the page as text.

    `samples` is the result of `samples_of`; `write_page` describes the other arguments.
    """
    filled = page.template(TEMPLATE)  # before the import of `view`, which needs further packages
    from holdfast.evaluate.report.view import page_view

    return filled.render(
        view=page_view(evaluation, timeline, previous=previous, samples=samples or {})
    )
