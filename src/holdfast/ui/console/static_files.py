"""The styles, scripts and drawings of the pages, each under a name with a hash of its content.

A browser keeps such a file for a year without asking again, and fetches a changed file at once,
because the page names the new hash. Grafana's dashboard keeps its name, which people type.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path, PurePath

from holdfast.core.page import UPLOT_SCRIPT, UPLOT_STYLE
from holdfast.core.page.parts import DARK, LIGHT

_HERE = Path(__file__).parent / "static"
_SCRIPT = "text/javascript; charset=utf-8"


@dataclass(frozen=True)
class StaticFile:
    """One file as the console sends it."""

    body: bytes
    kind: str
    """The media type."""
    is_named_by_content: bool = True
    """True if another content would have another name."""


def path_of(name: str) -> str:
    """Return the path by which pages name a file."""
    return f"/static/{_NAMES[name]}"


def _style() -> bytes:
    light = "".join(f"--{name}:{value};" for name, value in LIGHT.items())
    dark = "".join(f"--{name}:{value};" for name, value in DARK.items())
    colours = (
        f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f":root[data-theme=dark]{{{dark}}}\n"
    )
    own = (_HERE / "console.css").read_text()
    return (colours + own + UPLOT_STYLE.read_text()).encode()


def _hashed(name: str, body: bytes) -> str:
    pure = PurePath(name)
    return f"{pure.stem}.{hashlib.sha256(body).hexdigest()[:16]}{pure.suffix}"


_SOURCES = {
    "console.css": StaticFile(_style(), "text/css; charset=utf-8"),
    "console.js": StaticFile((_HERE / "console.js").read_bytes(), _SCRIPT),
    "chart.js": StaticFile((_HERE / "chart.js").read_bytes(), _SCRIPT),
    "uplot.js": StaticFile(UPLOT_SCRIPT.read_bytes(), _SCRIPT),
    "icon.svg": StaticFile((_HERE / "icon.svg").read_bytes(), "image/svg+xml"),
    "grafana.json": StaticFile(
        (_HERE / "grafana.json").read_bytes(), "application/json", is_named_by_content=False
    ),
}
_NAMES = {
    name: _hashed(name, file.body) if file.is_named_by_content else name
    for name, file in _SOURCES.items()
}
FILES = {_NAMES[name]: file for name, file in _SOURCES.items()}
"""Each file by the last part of its path."""
