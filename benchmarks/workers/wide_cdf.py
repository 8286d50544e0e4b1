"""Peers for the exact CDF of a wide telemetry CSV: DuckDB, Polars, the notebook's melt.

Prints one JSON object: the samples, their sum and median, so that all can be seen to agree.

    python wide_cdf.py duckdb|polars|notebook WIDE.csv
    python wide_cdf.py convert WIDE.csv OUT.parquet     bare DuckDB's conversion to long Parquet
    python wide_cdf.py parquet OUT.parquet              and its CDF from there
"""

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def header(path: str) -> list[str]:
    with Path(path).open() as file:
        return file.readline().rstrip("\n").split(",")


def answer(values: Sequence[float], counts: Sequence[int]) -> dict[str, float]:
    pairs = sorted(zip(values, counts, strict=True))
    n = sum(count for _, count in pairs)
    ranks = itertools.accumulate(count for _, count in pairs)
    median = next(
        value for (value, _), rank in zip(pairs, ranks, strict=True) if rank >= (n + 1) // 2
    )
    return {"n": n, "sum": sum(value * count for value, count in pairs), "median": median}


def by_duckdb(path: str) -> dict[str, float]:
    import duckdb

    names = header(path)
    columns = {name: "VARCHAR" if name == "Time" else "FLOAT" for name in names}
    connection = duckdb.connect()
    connection.execute("SET preserve_insertion_order = false; SET enable_progress_bar = false")
    found = connection.execute(
        f"""
        SELECT value, count(*) FROM (UNPIVOT (
            SELECT * EXCLUDE "Time"
            FROM read_csv('{path}', auto_detect = false, header = true, delim = ',', quote = '', escape = '',
                columns = {columns})
        ) ON COLUMNS(*) INTO NAME device VALUE value) GROUP BY value
        """
    ).fetchnumpy()
    return answer(found["value"].tolist(), found["count_star()"].tolist())


def by_polars(path: str) -> dict[str, float]:
    import polars as pl

    names = header(path)
    schema = {name: pl.String if name == "Time" else pl.Float32 for name in names}
    found = (
        pl.scan_csv(path, schema=schema)
        .drop("Time")
        .unpivot()
        .drop_nulls("value")
        .group_by("value")
        .len()
        .collect(engine="streaming")
    )
    return answer(found["value"].to_list(), found["len"].to_list())


def by_notebook(path: str) -> dict[str, float]:
    import numpy as np
    import pandas as pd

    data = pd.read_csv(path).melt(id_vars="Time", var_name="Server")
    data = data.dropna(subset=["value"])
    curve = data["value"].quantile(np.linspace(0, 1, num=1000)).to_numpy()
    return {"n": len(data), "sum": float(data["value"].sum()), "median": float(curve[500])}


def convert_by_duckdb(path: str, out: str) -> dict[str, float]:
    """Convert to (time, device, value), the layout that answers fastest.

    Columns are named by the device's number, then cast. Offsets of the times are not applied, which
    would take longer.
    """
    import duckdb

    names = header(path)
    columns = {"Time": "TIMESTAMP"} | {str(number): "FLOAT" for number in range(len(names) - 1)}
    connection = duckdb.connect()
    connection.execute("SET preserve_insertion_order = false; SET enable_progress_bar = false")
    connection.execute(
        f"""
        COPY (
            SELECT "Time" AS "at", device::SMALLINT AS device, value FROM (
                UNPIVOT (SELECT * FROM read_csv('{path}', auto_detect = false, header = true, delim = ',', quote = '',
                    escape = '', columns = {columns}))
                ON COLUMNS(* EXCLUDE "Time") INTO NAME device VALUE value
            )
        ) TO '{out}' (FORMAT parquet, COMPRESSION zstd)
        """
    )
    return {"bytes": Path(out).stat().st_size}


def by_parquet(path: str) -> dict[str, float]:
    import duckdb

    found = (
        duckdb.connect()
        .execute(f"SELECT value, count(*) AS n FROM '{path}' GROUP BY value")
        .fetchnumpy()
    )
    return answer(found["value"].tolist(), found["n"].tolist())


METHODS = {
    "convert": convert_by_duckdb,
    "parquet": by_parquet,
    "duckdb": by_duckdb,
    "polars": by_polars,
    "notebook": by_notebook,
}

if __name__ == "__main__":
    print(json.dumps(METHODS[sys.argv[1]](*sys.argv[2:])))
