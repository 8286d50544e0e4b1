"""Combine the readings of several files into one table per cluster.

Clusters get the names that the user gave.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from holdfast.trace.clusters import Cluster, known_first, together
from holdfast.trace.notes import Note
from holdfast.trace.schema import JOB_COLUMNS
from holdfast.trace.sources.reading import Reading
from holdfast.trace.sources.sql import literal

if TYPE_CHECKING:
    import duckdb

ASSUMED_SIZE: Final = "assumed-size"


def renamed(connection: "duckdb.DuckDBPyConnection", reading: Reading, name: str) -> Reading:
    """Rename the cluster of a reading to `name`; if it has several clusters, they become one.

    Several clusters may use the same job id, so the job ids then become `CLUSTER/ID`.
    """
    cluster = together(reading.clusters, name)
    if [one.name for one in reading.clusters] == [name]:
        return reading
    if len(reading.clusters) > 1 and "job_id" in reading.columns:
        connection.execute(f"UPDATE {reading.table} SET job_id = cluster || '/' || job_id")
    # A column with a default costs nothing for any number of rows.
    connection.execute(f"ALTER TABLE {reading.table} DROP COLUMN cluster")
    connection.execute(
        f"ALTER TABLE {reading.table} ADD COLUMN cluster VARCHAR DEFAULT {literal(name)}"
    )
    notes = tuple(replace(note, cluster=name) for note in reading.notes)
    if cluster.gpu_num:
        known = " and ".join(one.name for one in reading.clusters)
        sentence = (
            f"{name} is assumed to have the {cluster.gpu_num:,} GPUs of {known}, as no "
            "capacity was given."
        )
        notes += (Note(cluster=name, check=ASSUMED_SIZE, sentence=sentence, rows=0, action="kept"),)
    return replace(reading, clusters=(cluster,), notes=notes, lacking={})


def joined(
    connection: "duckdb.DuckDBPyConnection", readings: Sequence[Reading], new: Reading
) -> list[Reading]:
    """Add a reading to the list of readings.

    If the list already has a reading of the same cluster, the rows are appended to that reading's
    table.
    """
    names = {cluster.name for cluster in new.clusters}
    for place, old in enumerate(readings):
        if names.isdisjoint(cluster.name for cluster in old.clusters):
            continue
        for column in sorted(new.columns - old.columns):
            connection.execute(f"ALTER TABLE {old.table} ADD COLUMN {column} {JOB_COLUMNS[column]}")
        connection.execute(f"INSERT INTO {old.table} BY NAME SELECT * FROM {new.table}")
        connection.execute(f"DROP TABLE {new.table}")
        clusters = _merged(old.clusters, new.clusters)
        columns = old.columns | new.columns
        both = replace(
            old,
            columns=columns,
            clusters=clusters,
            notes=old.notes + new.notes,
            lacking={
                cluster.name: columns
                - _columns_of(old, cluster.name)
                - _columns_of(new, cluster.name)
                for cluster in clusters
            },
        )
        return [*readings[:place], both, *readings[place + 1 :]]
    return [*readings, new]


def _merged(old: Sequence[Cluster], new: Sequence[Cluster]) -> tuple[Cluster, ...]:
    merged = {cluster.name: cluster for cluster in old}
    for cluster in new:
        merged[cluster.name] = (
            known_first(merged[cluster.name], cluster) if cluster.name in merged else cluster
        )
    return tuple(merged.values())


def _columns_of(reading: Reading, cluster: str) -> frozenset[str]:
    is_there = any(one.name == cluster for one in reading.clusters)
    return reading.columns_of(cluster) if is_there else frozenset()
