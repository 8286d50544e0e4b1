"""The template filled: one page that needs no network."""

import base64
import hashlib
from pathlib import Path

from holdfast.core.templates import template
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
    scripts = [UPLOT_SCRIPT.read_text(), (TEMPLATES / "report.js").read_text()]
    style = UPLOT_STYLE.read_text() + (TEMPLATES / "report.css").read_text()
    return template(TEMPLATES / "report.html.j2").render(
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
