"""The report as a folder: the page, its findings, and each figure's drawing and numbers."""

import json
from pathlib import Path

from holdfast.core.errors import BadUse
from holdfast.trace.figures import standalone, write_paper
from holdfast.trace.report.folder import replaced
from holdfast.trace.report.model import Progress, Report
from holdfast.trace.report.page import render
from holdfast.trace.report.published import SCHEMA, findings_json
from holdfast.trace.report.view import page_view

PAGE, FINDINGS, FIGURES, DATA = "index.html", "findings.json", "figures", "data"
_SUFFIXES = {FIGURES: {".svg", ".pdf", ".png"}, DATA: {".csv"}}


def write_report(
    folder: Path, report: Report, *, paper: bool = False, progress: Progress | None = None
) -> Path:
    """Write the report, whole or not at all; an earlier report in `folder` is replaced by the complete new one.

    `index.html` needs no network and nothing beside it. `figures/NAME.svg` and `data/NAME.csv` are each figure's
    drawing and numbers, `findings.json` what was found (`holdfast.trace.findings`). Equal reports give equal bytes,
    PDF and PNG aside.

    Args:
        folder: where it goes; its parents are made.
        report: what to show.
        paper: also write `figures/NAME.pdf` and `figures/NAME.png`, fit for a paper.
        progress: called before each figure is drawn.

    Returns:
        The page.

    Raises:
        BadUse: the folder holds something that is not an earlier report.
        HoldfastError: jinja2 or matplotlib is not installed.
        OSError: something could not be written; an earlier report is untouched.
    """
    refuse_what_is_not_ours(folder)
    view = page_view(report, progress=progress)
    with replaced(folder) as new:
        for part in (FIGURES, DATA):
            (new / part).mkdir()
        for name, drawing in view.drawings.items():
            (new / FIGURES / f"{name}.svg").write_text(standalone(drawing), encoding="utf-8")
        for entry in report.entries:
            name, result = entry.analysis.name, entry.result
            if result is not None:
                (new / DATA / f"{name}.csv").write_text(
                    result.table.csv(), encoding="utf-8", newline=""
                )
                if paper and result.chart is not None:
                    write_paper(result.chart, new / FIGURES / name)
        (new / FINDINGS).write_text(findings_json(report), encoding="utf-8")
        (new / PAGE).write_text(render(view), encoding="utf-8")
    return folder / PAGE


def refuse_what_is_not_ours(folder: Path) -> None:
    """Do nothing if `folder` is missing, empty, or holds an earlier report and nothing else.

    Raises:
        BadUse: it holds something else, or is a file.
    """
    if not folder.exists():
        return
    next_step = "Name another folder, or remove this one."
    if not folder.is_dir():
        raise BadUse(f"{folder} is a file, and the report is a folder. {next_step}")
    if not _is_report(folder):
        if any(folder.iterdir()):
            raise BadUse(
                f"{folder} is not a report of holdfast, and would be overwritten. {next_step}"
            )
        return
    there = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    own = {Path(name) for name in (PAGE, FINDINGS, FIGURES, DATA)}
    for path in there:
        if path not in own and path.suffix not in _SUFFIXES.get(path.parent.as_posix(), set()):
            raise BadUse(
                f"{folder / path} is no part of a report, and would be lost. Move it, or name another folder."
            )


def _is_report(folder: Path) -> bool:
    try:
        found = json.loads((folder / FINDINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("schema") == SCHEMA
