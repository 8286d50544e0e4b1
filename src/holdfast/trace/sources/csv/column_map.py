"""Read a column map from TOML and validate it before any data; see `sources.csv.mapped`."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from zoneinfo import ZoneInfo

from holdfast.core.errors import BadUse
from holdfast.trace.clusters import Cluster
from holdfast.trace.schema import JOB_COLUMNS, STATES, TYPES

MAPPABLE: Final = tuple(name for name in JOB_COLUMNS if name not in {"type_rule", "zone_offset"})
UNIT_S: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_SECTIONS: Final = ("columns", "states", "types", "cluster", "file")
_CLUSTER_KEYS: Final = {
    "name": str, "nodes": int, "gpus_per_node": int, "gpus": int, "gpu_model": str, "gpu_tdp_w": float,
    "gpu_memory_mib": float, "utc_offset_h": float, "duration_counts_queue": bool, "time_resolution_s": float,
    "citation": str,
}  # fmt: skip
_TARGET_KEYS: Final = {
    "VARCHAR": (),
    "VARCHAR[]": ("separator",),
    "TIMESTAMP": ("format", "zone", "unit", "origin"),
    "DOUBLE": ("scale",),
    "INTEGER": ("scale",),
}


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """Describe the column of a file from which a column of the jobs table is read."""

    column: str
    """Name of the column in the file."""
    scale: float = 1.0
    separator: str = ","
    format: str | None = None
    zone: str = "UTC"
    unit: str = ""
    """A key of `UNIT_S` if the time is a number; '' if the time is a text."""
    origin_s: float = 0.0
    """The time that the number 0 means, in seconds since the Unix epoch."""


@dataclass(frozen=True, kw_only=True)
class ColumnMap:
    """The meaning of a file's columns, and the description of its cluster."""

    columns: Mapping[str, Mapped]
    states: Mapping[str, str]
    types: Mapping[str, str]
    cluster: Cluster
    delimiter: str = ","


@dataclass(frozen=True)
class _Place:
    """A place in the column map, for error messages."""

    path: Path
    names: tuple[str, ...] = field(default=())

    def __truediv__(self, name: str) -> "_Place":
        return _Place(self.path, (*self.names, name))

    def bad(self, problem: str, allowed: Iterable[str] = ()) -> BadUse:
        where = f"{self.path}, {'.'.join(self.names)}" if self.names else str(self.path)
        choices = ", ".join(allowed)
        return BadUse(
            f"{where}: {problem} {f'Allowed: {choices}.' if choices else 'Correct the column map.'}"
        )


def read_column_map(path: Path) -> ColumnMap:
    """Read a column map.

    Raises:
        BadUse: the map is not valid; the message has the place, the value and the allowed
            values.
    """
    place = _Place(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise place.bad(f"This is not a TOML file: {error}.") from error
    for section, entries in content.items():
        if section not in _SECTIONS:
            raise place.bad(f"There is no section {section!r}.", _SECTIONS)
        if not isinstance(entries, dict):
            raise (place / section).bad("Expected a table.")
    if not content.get("columns"):
        raise place.bad("It has no [columns] section, which maps the columns of jobs.")
    columns = {
        name: _mapped(place / "columns" / name, name, entry)
        for name, entry in content["columns"].items()
    }
    return ColumnMap(
        columns=columns,
        states=_words(place / "states", content.get("states", {}), STATES),
        types=_words(place / "types", content.get("types", {}), TYPES),
        cluster=_cluster(place / "cluster", content.get("cluster", {}), path.stem),
        delimiter=_delimiter(place / "file", content.get("file", {})),
    )


def _mapped(place: _Place, name: str, entry: Any) -> Mapped:
    if name not in MAPPABLE:
        raise place.bad(f"Jobs have no column {name!r}.", MAPPABLE)
    if isinstance(entry, str):
        return Mapped(column=entry)
    if not isinstance(entry, dict) or not isinstance(entry.get("column"), str):
        raise place.bad(
            f"Expected the name of a column of the file, or {{column = NAME}}, found {entry!r}."
        )
    allowed = ("column", *_TARGET_KEYS[JOB_COLUMNS[name]])
    if unknown := sorted(set(entry) - set(allowed)):
        raise place.bad(f"There is no {unknown[0]!r} here.", allowed)
    texts = {
        key: _typed(place / key, entry[key], str)
        for key in ("separator", "format", "zone")
        if key in entry
    }
    if texts.get("separator") == "":
        raise (place / "separator").bad("Expected a text that separates names, found ''.")
    if "zone" in texts:
        _check_zone(place / "zone", texts["zone"])
    unit = entry.get("unit", "")
    if "unit" in entry and unit not in UNIT_S:
        raise (place / "unit").bad(f"Found {unit!r}.", UNIT_S)
    if "origin" in entry and not unit:
        raise (place / "origin").bad("An origin is of a number of a unit, and no unit is given.")
    if unit and texts.keys() & {"format", "zone"}:
        raise (place / "unit").bad("A number of a unit has neither format nor zone.")
    return Mapped(
        column=entry["column"],
        scale=_typed(place / "scale", entry.get("scale", 1.0), float),
        unit=unit,
        origin_s=_origin_s(place / "origin", entry["origin"]) if "origin" in entry else 0.0,
        **texts,
    )


def _cluster(place: _Place, entries: Mapping[str, Any], default_name: str) -> Cluster:
    for key, value in entries.items():
        if key not in _CLUSTER_KEYS:
            raise place.bad(f"There is no {key!r} here.", _CLUSTER_KEYS)
        _typed(place / key, value, _CLUSTER_KEYS[key])
        if key in {"nodes", "gpus_per_node", "gpus"} and value < 1:
            raise (place / key).bad(f"Expected a number above 0, found {value}.")
    known = {key: value for key, value in entries.items() if key not in {"name", "nodes", "gpus"}}
    nodes, per_node = entries.get("nodes"), entries.get("gpus_per_node")
    return Cluster(
        name=entries.get("name") or default_name,
        source="map",
        node_num=nodes,
        gpu_num=entries.get("gpus") or (nodes * per_node if nodes and per_node else None),
        **known,
    )


def _words(place: _Place, words: Mapping[str, Any], allowed: Iterable[str]) -> dict[str, str]:
    for word, meaning in words.items():
        if meaning not in allowed:
            raise (place / word).bad(f"Found {meaning!r}.", allowed)
    # Words of the schema itself need no entry.
    return {**{word: word for word in allowed}, **words}


def _delimiter(place: _Place, entries: Mapping[str, Any]) -> str:
    if unknown := sorted(set(entries) - {"delimiter"}):
        raise place.bad(f"There is no {unknown[0]!r} here.", ["delimiter"])
    delimiter: str = _typed(place / "delimiter", entries.get("delimiter", ","), str)
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise (place / "delimiter").bad(f"Expected one character, found {delimiter!r}.")
    return delimiter


def _typed(place: _Place, value: Any, kind: type) -> Any:
    right = isinstance(value, (int, float) if kind is float else kind) and (
        kind is bool or not isinstance(value, bool)
    )
    if not right:
        named = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[
            kind
        ]
        raise place.bad(f"Expected {named}, found {value!r}.")
    return value


def _check_zone(place: _Place, zone: str) -> None:
    try:
        ZoneInfo(zone)
    except (KeyError, ValueError, OSError) as error:
        raise place.bad(
            f"There is no time zone {zone!r}; names are those of the IANA database."
        ) from error


def _origin_s(place: _Place, origin: Any) -> float:
    try:
        at = origin if isinstance(origin, datetime) else datetime.fromisoformat(origin)
    except (TypeError, ValueError) as error:
        raise place.bad(
            f"Expected a time such as 2023-05-17T11:30:13Z, found {origin!r}."
        ) from error
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
