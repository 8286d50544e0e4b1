"""Check that the aggregates of any division of the jobs merge to the aggregates of the whole."""

import numpy as np
import pytest
from job_tables import made_up, trace_of

from holdfast.trace import aggregates

JOB_AGGREGATES = (
    "job_arrivals", "job_counts", "job_durations", "job_evaluation_minutes", "job_host_demand", "job_hours",
    "job_queues", "job_size_hours", "job_users", "node_hours", "failure_users", "queue_months",
)  # fmt: skip


def rows(connection, sql):
    """Return the rows of a query by their keys, and their measures."""
    result = connection.execute(sql)
    columns = [column[0] for column in result.description]
    measured = [
        column == "n" or column.startswith(("n_", "sum_", "min_", "max_")) for column in columns
    ]
    keyed = {}
    for row in result.fetchall():
        key = tuple(
            value for value, is_measure in zip(row, measured, strict=True) if not is_measure
        )
        assert key not in keyed, f"two rows of {key}"
        keyed[key] = [value for value, is_measure in zip(row, measured, strict=True) if is_measure]
    return columns, keyed


@pytest.mark.parametrize("name", JOB_AGGREGATES)
@pytest.mark.parametrize("parts", [2, 7])
def test_a_cut_merges_to_the_whole(name, parts):
    frame = made_up()
    random = np.random.default_rng(parts)
    frame["nodes"] = [
        [f"node-{node}" for node in random.integers(0, 9, 3)] for _ in range(len(frame))
    ]
    frame["exit_code"] = random.integers(0, parts, len(frame))  # marks the part of a job
    with trace_of(frame) as trace:
        connection = trace.connection
        columns, whole = rows(connection, aggregates.sql(name))
        connection.execute("CREATE TABLE all_jobs AS SELECT * FROM jobs")
        for part in range(parts):
            connection.execute(
                f"CREATE OR REPLACE VIEW jobs AS SELECT * FROM all_jobs WHERE exit_code = {part}"
            )
            made = (
                f"CREATE TABLE cut AS {aggregates.sql(name)}"
                if part == 0
                else f"INSERT INTO cut {aggregates.sql(name)}"
            )
            connection.execute(made)
        merged_columns, merged = rows(connection, aggregates.merge_sql(columns, "cut"))
    assert sorted(merged_columns) == sorted(columns)
    assert merged.keys() == whole.keys()
    order = [
        column
        for column in columns
        if column == "n" or column.startswith(("n_", "sum_", "min_", "max_"))
    ]
    again = [column for column in merged_columns if column in order]
    assert again == order
    for key, expected in whole.items():
        for found, value in zip(merged[key], expected, strict=True):
            assert found == (
                pytest.approx(value, rel=1e-9, abs=1e-6) if isinstance(value, float) else value
            ), key
