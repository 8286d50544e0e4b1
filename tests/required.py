"""Find the installed distributions that Holdfast requires."""

import importlib.metadata
import tomllib
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def required_distributions(*extras: str) -> dict[str, Distribution]:
    """Return all that `holdfast[extras]` requires, directly or not, by canonical name.

    Requirements for other platforms are left out, since they are not installed.
    """
    found: dict[str, Distribution] = {}
    seen, todo = set(), [("holdfast", frozenset(extras))]
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        if name == "holdfast":
            lines = _own_requirements()
        else:
            try:
                found[name] = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                continue
            lines = found[name].requires or []
        for line in lines:
            one = Requirement(line)
            if one.marker is None or any(
                one.marker.evaluate({"extra": extra}) for extra in wanted | {""}
            ):
                todo.append((canonicalize_name(one.name), frozenset(one.extras)))
    return found


def _own_requirements() -> list[str]:
    # From the file of the project: an editable installation may be older.
    extras = PROJECT["optional-dependencies"].items()
    return [
        *PROJECT["dependencies"],
        *(f"{line}; extra == '{extra}'" for extra, lines in extras for line in lines),
    ]
