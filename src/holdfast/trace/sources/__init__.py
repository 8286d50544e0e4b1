"""Read job records: one adapter per format.

An adapter converts a file to a table of jobs and a description of its clusters.

| module | one idea |
|---|---|
| `reading` | define an adapter and its result |
| `plain_text` | read bytes and lines |
| `json_stream` | read the objects of a long JSON document |
| `rows` | write rows of a Python parser to the database |
| `joining` | combine the readings of several files |
| `recognition` | find the adapter of a file |
| `guesses` | guess the origin of a file that no adapter reads |
| `slurm`, `kubernetes`, `accounting` | read the formats of sites' schedulers |
| `csv` | read CSV files with any columns, by a column map |
| `published` | read published traces and traces of simulators |
| `stored`, `ledger` | read Holdfast's own stores and ledgers |

Every module in `MODULES` is an adapter and defines a `SOURCE`.
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
"""The adapter modules, in the order in which they try to recognise a file: most specific first."""


@cache
def adapters() -> "tuple[Source, ...]":
    """Return all adapters."""
    return tuple(import_module(f"{__name__}.{name}").SOURCE for name in MODULES)
