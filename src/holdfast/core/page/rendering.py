"""Fill Jinja templates.

Every text is escaped, and its control characters are made visible. A template that uses an
undefined name raises an error.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core import words
from holdfast.core.atomic import write_atomic
from holdfast.core.page.drawing import missing_extra
from holdfast.core.page.parts import DARK, LIGHT

if TYPE_CHECKING:
    from jinja2 import Environment, Template


SHARED = Path(__file__).parent / "templates"
_VENDOR = Path(__file__).parent / "vendor"
UPLOT_SCRIPT = _VENDOR / "uplot-1.6.32.iife.min.js"
UPLOT_STYLE = _VENDOR / "uplot-1.6.32.min.css"


def template(path: Path) -> "Template":
    """Load the template at a path.

    The template may include templates of its own folder and the shared templates.

    Raises:
        HoldfastError: jinja2 is not installed.
    """
    return environment(path.parent).get_template(path.name)


def environment(folder: Path) -> "Environment":
    """Create a Jinja environment for the templates of a folder and the shared templates.

    Raises:
        HoldfastError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise missing_extra("jinja2") from error
    made = Environment(
        loader=FileSystemLoader([folder, SHARED]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["page_colours"] = {"light": LIGHT, "dark": DARK}
    return made


def write_page(path: Path, page: str) -> None:
    """Write a page to a file, whole or not at all; create the folder if needed.

    Raises:
        OSError: the page could not be written; an earlier page at `path` is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, page.encode())


def _finalize(value: Any) -> Any:
    """Make control characters in a text visible before Jinja escapes it; leave markup as it is."""
    return words.clean(value) if type(value) is str else value
