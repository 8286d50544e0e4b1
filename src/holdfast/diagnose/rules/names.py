"""Who a line is about, told by the words around a name, whichever rule knows the line."""

import functools
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import re2
import yaml


class Names:
    """The patterns of `names.yaml`."""

    def __init__(self, given: Sequence[Mapping[str, Any]]) -> None:
        self.examples = [(one["id"], one["kinds"], one["example"], one["tells"]) for one in given]
        self._by_kind: dict[str, list[Any]] = {}
        for one in given:
            pattern = re2.compile(one["pattern"])
            for kind in one["kinds"]:
                self._by_kind.setdefault(kind, []).append(pattern)

    def told(self, kind: str, text: str) -> dict[str, str]:
        """What `text`, of an event of `kind`, says: the groups of `names.yaml`; of two, the first pattern's."""
        found: dict[str, str] = {}
        for pattern in self._by_kind.get(kind, ()):
            if match := pattern.search(text):
                for name, value in match.groupdict().items():
                    found.setdefault(name, value)
        return found


@functools.cache
def names() -> Names:
    """The patterns that come with Holdfast."""
    text = (resources.files("holdfast.diagnose.rules") / "names.yaml").read_text("utf-8")
    return Names(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
