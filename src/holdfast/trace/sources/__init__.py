"""Adapters: what enters is a file of some form, what leaves a table of jobs and what is known of their clusters.

`reading` says what an adapter is and what it makes; `plain_text` reads bytes and lines, `json_stream` the objects of a
long JSON document, `rows` takes rows that Python parsed, `joining` puts readings together, `recognition` finds the
adapter of a file, and `guesses` says what a file is that none knows. Every module that `MODULES` names is an adapter, a
form of job records, with its `SOURCE`: `slurm`, `kubernetes`, `accounting` (of other schedulers) and `csv` (of any
columns, by a map) read forms of sites, `published` those of published traces and of simulators, `stored` and `ledger`
Holdfast's own.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from holdfast.trace.sources.reading import Source

MODULES: Final = (
    "stored",
    "published.acme",
    "published.philly",
    "published.helios",
    "published.pai",
    "published.openb",
    "slurm.sacct",
    "kubernetes.jobs",
    "kubernetes.kueue",
    "accounting.swf",
    "accounting.pbs",
    "accounting.lsf",
    "published.simulators",
    "ledger",
)
"""Adapter modules, in the order in which they are asked whether a file is theirs: the most particular first."""


@cache
def adapters() -> "tuple[Source, ...]":
    """Every adapter there is."""
    return tuple(import_module(f"{__name__}.{name}").SOURCE for name in MODULES)
