"""The template filled: one page that needs no network."""

import base64
import hashlib
from pathlib import Path
from typing import Any

from holdfast.core import words
from holdfast.core.drawing import missing_extra
from holdfast.trace.figures.look import DARK, DASHES, LIGHT
from holdfast.trace.report.view import PageView

_FOLDER = Path(__file__).parent
TEMPLATES = _FOLDER / "templates"
UPLOT_SCRIPT = _FOLDER / "vendor" / "uplot-1.6.32.iife.min.js"
UPLOT_STYLE = _FOLDER / "vendor" / "uplot-1.6.32.min.css"


def render(view: PageView) -> str:
    """The page as text. Equal views give equal text.

    Its Content-Security-Policy lets nothing be fetched and no script run but the two in it, named by their hashes.

    Raises:
        HoldfastError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise missing_extra("jinja2") from error
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    scripts = [UPLOT_SCRIPT.read_text(), (TEMPLATES / "report.js").read_text()]
    style = UPLOT_STYLE.read_text() + (TEMPLATES / "report.css").read_text()
    return environment.get_template("report.html.j2").render(
        view=view,
        light=LIGHT,
        dark=DARK,
        dashes=[[] if dash == "solid" else list(dash[1]) for dash in DASHES],
        style=style,
        scripts=scripts,
        hashes=[_hash(script) for script in scripts],
        policy=(
            "default-src 'none'; style-src 'unsafe-inline'; script-src "
            + " ".join(f"'{_hash(script)}'" for script in scripts)
        ),
    )


def _hash(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _finalize(value: Any) -> Any:
    """Every text the page shows passes here, on its way to being escaped; markup made here does not."""
    return words.clean(value) if type(value) is str else value
