"""Read and write the manifest of a folder of results, which describes its Parquet files."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from holdfast.core.atomic import write_atomic
from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import BadTrace
from holdfast.trace.notes import Note

FILE: Final = "manifest.json"
VERSION: Final = 1


@dataclass(frozen=True, kw_only=True)
class Held:
    """Describe the content of a folder of results for one cluster."""

    cluster: Cluster
    compared: bool
    """True if the cluster serves only for comparison."""
    columns: frozenset[str]
    """The columns of `schema.JOB_COLUMNS` that the cluster's jobs have."""
    rows: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describe the content of a folder of results."""

    kind: str
    """The kind of folder.

    A `store` contains jobs.parquet and optionally telemetry. A `partial` contains one
    agg_NAME.parquet for each of `aggregates`.
    """
    duration: str
    """One of `schema.DURATIONS`.

    In a `partial`, this is how durations in the aggregates are defined. In a `store`, it is the
    option with which the jobs were stored.
    """
    clusters: tuple[Held, ...]
    notes: tuple[Note, ...]
    aggregates: tuple[str, ...] = ()
    metrics: frozenset[str] = frozenset()
    """Names of the telemetry metrics."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Entries that other programs added, together with their files; they are preserved."""


def is_folder_of(path: Path, kind: str) -> bool:
    """Return True if the folder at `path` has a manifest of this kind. Never raise an error."""
    try:
        content = json.loads((path / FILE).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("schema") == f"holdfast.trace.{kind}"


def read_manifest(folder: Path, kind: str) -> Manifest:
    """Read the manifest of a folder.

    Raises:
        BadTrace: the folder has no manifest of this kind and version.
    """
    path = folder / FILE
    try:
        content = json.loads(path.read_bytes())
        version = content["version"] if content["schema"] == f"holdfast.trace.{kind}" else None
        if version != VERSION:
            raise BadTrace(  # noqa: TRY301 - what follows is one reading of the file
                path,
                f"Found {content['schema']} {content['version']}; expected holdfast.trace.{kind} {VERSION}.",
                next_step="Give another folder, or write it again with this Holdfast.",
            )
        return Manifest(
            kind=kind,
            duration=content["duration"],
            clusters=tuple(_held(entry) for entry in content["clusters"]),
            notes=tuple(
                Note(**{**note, "examples": tuple(note["examples"])}) for note in content["notes"]
            ),
            aggregates=tuple(content["aggregates"]),
            metrics=frozenset(content["metrics"]),
            more=content["more"],
        )
    except BadTrace:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadTrace(
            path,
            f"This is not a manifest of a {kind}: {error}.",
            next_step="Write the folder again.",
        ) from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write or replace the manifest of a folder atomically."""
    content = {
        "schema": f"holdfast.trace.{manifest.kind}",
        "version": VERSION,
        "duration": manifest.duration,
        "clusters": [
            {
                **asdict(held.cluster),
                "compared": held.compared,
                "columns": sorted(held.columns),
                "rows": held.rows,
            }
            for held in manifest.clusters
        ],
        "notes": [asdict(note) for note in manifest.notes],
        "aggregates": list(manifest.aggregates),
        "metrics": sorted(manifest.metrics),
        "more": dict(manifest.more),
    }
    write_atomic(folder / FILE, (json.dumps(content, indent=1) + "\n").encode())


def _held(entry: Mapping[str, Any]) -> Held:
    beside = {"compared", "columns", "rows"}
    cluster = Cluster(**{name: value for name, value in entry.items() if name not in beside})
    return Held(
        cluster=cluster,
        compared=entry["compared"],
        columns=frozenset(entry["columns"]),
        rows=entry["rows"],
    )
