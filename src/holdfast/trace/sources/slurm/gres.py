"""Read the generic resources (GRES) that Slurm up to 20.11 prints.

The trackable resources (TRES) of these versions may lack the GPUs. AllocGRES counts the resources
of the whole job, and ReqGRES the resources of each node (sacct(1) of Slurm 19.05). If the TRES of a
record have GPUs, its GRES are ignored.
"""

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from holdfast.trace.sources.rows import read_rows

if TYPE_CHECKING:
    import duckdb

_NOTHING: Final = frozenset({"", "0", "(null)", "None", "N/A", "Unknown"})
_ITEM = re.compile(r"(?:[^,(]|\([^)]*\))+")
_GRES = re.compile(
    r"(?:gres[:/])?(?P<name>[A-Za-z_]\w*|7696487)(?::(?P<type>[A-Za-z_][^:,()]*))?(?::(?P<count>\d+))?(?:\([^)]*\))?$"
)
_GPU_PLUGIN: Final = "7696487"
"""Number of Slurm's GPU plugin, which Slurm prints if it lost the plugin's name."""


@lru_cache(maxsize=65536)
def tres_of_gres(gres: str, nodes: int = 1) -> str:
    """Convert generic resources such as `gpu:v100:4` to a TRES text.

    Args:
        gres: `NAME`, `NAME:COUNT`, `NAME:TYPE` or `NAME:TYPE:COUNT`, joined by commas.
        nodes: number of nodes, each of which has these resources.

    Raises:
        ValueError: the text is not a list of generic resources.
    """
    if gres in _NOTHING:
        return ""
    amounts: dict[str, int] = {}
    for item in _ITEM.findall(gres):
        match = _GRES.match(item.strip())
        if match is None:
            raise ValueError("expected generic resources such as gpu:v100:4")
        name = "gpu" if match["name"] == _GPU_PLUGIN else match["name"]
        count = int(match["count"] or 1) * nodes
        for kind in (name, f"{name}:{match['type']}" if match["type"] else ""):
            if kind:
                amounts[f"gres/{kind}"] = amounts.get(f"gres/{kind}", 0) + count
    return ",".join(f"{kind}={count}" for kind, count in amounts.items())


def with_gres(
    connection: "duckdb.DuckDBPyConnection", table: str, source: str, present: frozenset[str]
) -> str:
    """Return SQL of the records in which the GPUs from GRES are added to the TRES texts.

    Args:
        connection: the database.
        table: name of a new table for the distinct GRES texts and their meaning.
        source: SQL of the records, as texts.
        present: names of the texts that the file has.
    """
    fields = sorted(present & {"allocated_gres", "requested_gres"})
    texts = set[tuple[str, int]]()
    for field in fields:
        distinct = f"SELECT DISTINCT {field}, {_nodes_of(field)} FROM {source} WHERE {field} <> ''"
        texts |= set(connection.execute(distinct).fetchall())
    read_rows(
        connection,
        table,
        {"text": "VARCHAR", "nodes": "INTEGER", "tres": "VARCHAR"},
        ((text, nodes, _read(text, nodes)) for text, nodes in sorted(texts)),
    )
    if not fields:
        return source
    merged = ", ".join(
        f"{_merged(field.removesuffix('_gres'), field)} AS {field.removesuffix('_gres')}"
        for field in fields
    )
    joins = " ".join(
        f"LEFT JOIN {table} AS of_{field} ON of_{field}.text = s.{field} AND of_{field}.nodes = "
        f"{_nodes_of(field)}"
        for field in fields
    )
    return f"(SELECT s.* REPLACE ({merged}) FROM {source} AS s {joins})"


def _nodes_of(field: str) -> str:
    return "coalesce(try_cast(node_count AS INTEGER), 1)" if field == "requested_gres" else "1"


def _merged(tres: str, gres: str) -> str:
    """Return SQL that adds the GPUs of a GRES text to a TRES text.

    A GRES text that cannot be parsed replaces the TRES text, so that the error is reported when the
    TRES text is parsed.
    """
    return (
        f"CASE WHEN contains(coalesce(s.{tres}, ''), 'gres/gpu') THEN s.{tres}"
        f" WHEN of_{gres}.text IS NOT NULL AND of_{gres}.tres IS NULL THEN s.{gres}"
        f" ELSE nullif(concat_ws(',', nullif(s.{tres}, ''), nullif(of_{gres}.tres, '')), '') END"
    )


def _read(text: str, nodes: int) -> str | None:
    try:
        return tres_of_gres(text, nodes)
    except ValueError:
        return None
