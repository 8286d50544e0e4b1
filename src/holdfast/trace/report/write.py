"""Write the report as a folder: the page, its findings, and each figure's drawing and numbers."""

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.core import page
from holdfast.core.errors import BadUse
from holdfast.core.page import template
from holdfast.trace.figures import standalone, write_paper
from holdfast.trace.figures.look import DARK, DASHES, LIGHT
from holdfast.trace.report.folder import replaced
from holdfast.trace.report.model import Progress, Report
from holdfast.trace.report.overview import overviews
from holdfast.trace.report.view import TraceView, answer, page_view

PAGE, FINDINGS, FIGURES, DATA = "index.html", "findings.json", "figures", "data"
_SUFFIXES = {FIGURES: {".svg", ".pdf", ".png"}, DATA: {".csv"}}


def write_report(
    folder: Path, report: Report, *, paper: bool = False, progress: Progress | None = None
) -> Path:
    """Write the report atomically; replace an earlier report in `folder`.

    `index.html` needs no network and no other file. `figures/NAME.svg` and `data/NAME.csv` are the
    drawing and the numbers of each figure. `findings.json` contains the findings
    (`holdfast.trace.findings`). Equal reports give equal bytes, except for PDF and PNG.

    Args:
        folder: the folder of the report; its parent folders are created if needed.
        report: the report.
        paper: True to also write `figures/NAME.pdf` and `figures/NAME.png` for a paper.
        progress: called before each figure is drawn.

    Returns:
        The path of the page.

    Raises:
        BadUse: the folder contains something other than an earlier report.
        HoldfastError: jinja2 or matplotlib is not installed.
        OSError: a file could not be written; an earlier report is unchanged.
    """
    require_report_folder(folder)
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


def require_report_folder(folder: Path) -> None:
    """Raise an error unless `folder` is missing, is empty, or contains only an earlier report.

    Raises:
        BadUse: the folder contains something else, or is a file.
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
                f"{folder / path} is not part of a report, and would be lost. Move it, or name another folder."
            )


def _is_report(folder: Path) -> bool:
    try:
        found = json.loads((folder / FINDINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("schema") == SCHEMA


SCHEMA = "holdfast.trace.findings"
VERSION = 1


def findings_json(report: Report) -> str:
    """Return the report as a JSON object.

    The keys are `schema`, `version`, `title`, `answer`, `clusters`, `overviews`, `actions`,
    `findings`, `notes`, `analyses` and `numbers`. An unknown number is null. Names of numbers have
    the form `CLUSTER.WHAT_UNIT`.
    """
    made = {
        "schema": SCHEMA,
        "version": VERSION,
        "title": report.title,
        "answer": answer(report),
        "duration": report.duration,
        "parameters": dict(report.parameters),
        "clusters": [
            {
                "name": read.cluster.name,
                "source": read.cluster.source,
                "jobs": read.jobs,
                "gpu_jobs": read.gpu_jobs,
                "gpu_time_s": read.gpu_time_s,
                "first_submission": read.first or None,
                "last_submission": read.last or None,
                "compared": read.compared,
            }
            for read in report.clusters
        ],
        "overviews": [asdict(one) for one in overviews(report)],
        "actions": [
            {"cluster": one.cluster, **asdict(action)}
            for one in overviews(report) for action in one.actions
        ],
        "findings": [asdict(finding) for finding in report.findings],
        "notes": [
            {"cluster": note.cluster, "check": note.check, "rows": note.rows, "action": note.action,
             "sentence": note.sentence, "examples": list(note.examples)}
            for note in report.notes
        ],
        "analyses": [
            {"name": entry.analysis.name, "section": entry.analysis.section, "title": entry.analysis.title,
             "source": entry.analysis.source, "caption": entry.result.caption if entry.result else None,
             "left_out": entry.left_out or None}
            for entry in report.entries
        ],
        "numbers": report.numbers,
    }  # fmt: skip
    return json.dumps(_told(made), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _told(value: Any) -> Any:
    """Replace non-finite numbers by None in a nested value, because JSON cannot express them."""
    if isinstance(value, dict):
        return {key: _told(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_told(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    # An analysis may have returned NumPy's own numbers.
    return value.item() if hasattr(value, "item") else value


TEMPLATES = Path(__file__).parent / "templates"


def render(view: TraceView) -> str:
    """Render the page as HTML text. Equal views give equal text.

    The page's Content-Security-Policy forbids loading anything, and allows only the two scripts in
    the page, which it identifies by their hashes.

    Raises:
        HoldfastError: jinja2 is not installed.
    """
    scripts = [page.UPLOT_SCRIPT.read_text(), (TEMPLATES / "report.js").read_text()]
    style = page.UPLOT_STYLE.read_text() + (TEMPLATES / "report.css").read_text()
    return template(TEMPLATES / "report.html.j2").render(
        view=view,
        light=_series(LIGHT),
        dark=_series(DARK),
        dashes=[[] if dash == "solid" else list(dash[1]) for dash in DASHES],
        style=style,
        scripts=scripts,
        hashes=[_hash(script) for script in scripts],
        policy=(
            "default-src 'none'; style-src 'unsafe-inline'; script-src "
            + " ".join(f"'{_hash(script)}'" for script in scripts)
        ),
    )


def _series(colours: Mapping[str, str]) -> dict[str, str]:
    """Return the colours of the figures, without those that every page defines."""
    return {name: colour for name, colour in colours.items() if name not in page.LIGHT}


def _hash(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
