"""Adapters: what enters is a file of some form, what leaves a table of jobs and what is known of their clusters.

`reading` says what an adapter is and what it makes; `csv_text` reads CSV (`csv_sql` its SQL, `csv_faults` its errors,
`plain_text` its bytes), `rows` takes rows that Python parsed, `json_stream` the objects of a long JSON document. Every
other module that `MODULES` names is an adapter: one published or site's form of job records, its `SOURCE`.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from holdfast.trace.sources.reading import Source

MODULES: Final = (
    "stored",
    "acme",
    "philly",
    "helios",
    "pai",
    "openb",
    "slurm",
    "kubernetes",
    "kueue",
    "ledger",
)
"""Adapter modules, in the order in which they are asked whether a file is theirs: the most particular first."""


@cache
def sources() -> "tuple[Source, ...]":
    """Every adapter there is."""
    return tuple(import_module(f"{__name__}.{name}").SOURCE for name in MODULES)
