"""Render and write the page, which needs no network and runs no script."""

from pathlib import Path

from holdfast.core import page
from holdfast.evaluate.types.evaluation import Evaluation
from holdfast.evaluate.types.timeline import Timeline

TEMPLATE = Path(__file__).parent / "templates" / "evaluation.html.j2"


def write_page(path: Path, evaluation: Evaluation, timeline: Timeline) -> None:
    """Write the page of an evaluation; equal evaluations give equal bytes.

    Raises:
        HoldfastError: jinja2 or numpy is not installed.
        OSError: the page could not be written; an earlier one at `path` is untouched.
    """
    page.write_page(path, render(evaluation, timeline))


def render(evaluation: Evaluation, timeline: Timeline) -> str:
    """Render the page as text; see `write_page`."""
    filled = page.template(TEMPLATE)  # before `view`, which needs further packages
    from holdfast.evaluate.report.view import page_view

    return filled.render(view=page_view(evaluation, timeline))
