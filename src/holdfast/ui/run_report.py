"""Write the report on runs: fill the template, and write the page whole or not at all."""

from collections.abc import Sequence
from pathlib import Path

from holdfast.core.accounting import RunSummary
from holdfast.core.page import template, write_page

TEMPLATES = Path(__file__).parent / "templates"


def write_report(
    path: Path, summaries: Sequence[RunSummary], *, title: str, home: Path | None = None
) -> None:
    """Write one self-contained HTML page about runs: the first in full, the others in short below.

    The page needs no network and runs no script. Text from logs is escaped, and its control
    characters are made visible. Equal summaries give equal bytes.

    Args:
        path: the path of the page; its folder is created.
        summaries: the summaries of the runs, at least one.
        title: the title of the page.
        home: the folder above the runs' folders, whose logs are searched for the user's own frame
            of a failure; None: no log is read.

    Raises:
        HoldfastError: jinja2 or matplotlib is not installed.
        OSError: the page could not be written; an earlier one at `path` is untouched.
    """
    assert summaries, "a report is about at least one run"
    write_page(path, render(summaries, title=title, home=home))


def render(summaries: Sequence[RunSummary], *, title: str, home: Path | None = None) -> str:
    """Return the page as text; see `write_report`."""
    from holdfast.ui.view import run_view

    views = [
        run_view(summary, key=f"r{number}", home=home)
        for number, summary in enumerate(summaries, start=1)
    ]
    return template(TEMPLATES / "run_report.html.j2").render(
        title=title, main=views[0], others=views[1:]
    )
