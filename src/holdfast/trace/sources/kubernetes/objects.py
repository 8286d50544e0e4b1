"""Read the objects that `kubectl get -o json` or `-o yaml` printed, one after another.

JSON is streamed. A YAML document is held in memory, because the YAML parser cannot stream. For
large clusters, export JSON.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.json_stream import json_objects
from holdfast.trace.sources.plain_text import head, opened_text

_YAML: Final = re.compile(r"^(---\s*|- )?(apiVersion|items|kind|metadata):", re.MULTILINE)
_LIST: Final = frozenset({"items"})


def kubernetes_objects(
    path: Path, *, next_step: str
) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """Yield each object with the number of its first line; of a list, yield its items.

    Line numbers are available for JSON only.

    Raises:
        BadTrace: the file is neither JSON nor YAML, is cut off, or an item is not an object; the
            message has the line.
    """
    if _is_yaml(head(path)):
        yield from _of_yaml(path, next_step)
    else:
        yield from json_objects(path, _LIST, next_step=next_step)


def names_a_kind(path: Path, kinds: str) -> bool:
    """Return True if a file begins with Kubernetes objects whose kind matches a pattern."""
    start = head(path)
    if _is_yaml(start):
        return (
            re.search(rf"^\s*(- )?kind: (['\"]?)({kinds})\2\s*$", start, re.MULTILINE) is not None
        )
    return '"metadata"' in start and re.search(rf'"kind"\s*:\s*"({kinds})"', start) is not None


def _is_yaml(start: str) -> bool:
    return not start.lstrip("\ufeff \t\r\n").startswith(("{", "[")) and bool(_YAML.search(start))


def _of_yaml(path: Path, next_step: str) -> Iterator[tuple[None, dict[str, Any]]]:
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """A YAML loader that keeps times as text, as JSON does."""

    Loader.yaml_implicit_resolvers = {
        first: [one for one in resolvers if not one[0].endswith(":timestamp")]
        for first, resolvers in Loader.yaml_implicit_resolvers.items()
    }
    with opened_text(path) as file:
        try:
            for document in yaml.load_all(file, Loader):
                items = document if isinstance(document, list) else [document]
                if isinstance(document, dict) and isinstance(document.get("items"), list):
                    items = document["items"]
                for item in items:
                    if item is None:  # an empty document
                        continue
                    if not isinstance(item, dict):
                        problem = f"expected objects of Kubernetes, not {str(item)[:40]!r}."
                        raise BadTrace(path, problem, next_step=next_step)
                    yield None, item
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            raise BadTrace(
                path,
                f"expected YAML: {getattr(error, 'problem', None) or error}.",
                line=mark.line + 1 if mark else None,
                next_step=next_step,
            ) from None
