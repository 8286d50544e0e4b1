"""Jinja templates filled: everything escaped, untrusted text made visible, nothing missing in silence."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core import words
from holdfast.core.drawing import missing_extra

if TYPE_CHECKING:
    from jinja2 import Template


def template(path: Path) -> "Template":
    """The template in a file; others of its folder may be included.

    Raises:
        HoldfastError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise missing_extra("jinja2") from error
    environment = Environment(
        loader=FileSystemLoader(path.parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(path.name)


def _finalize(value: Any) -> Any:
    """Every text the page shows passes here, on its way to being escaped; markup made here does not."""
    return words.clean(value) if type(value) is str else value
