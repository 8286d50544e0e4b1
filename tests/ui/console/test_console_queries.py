"""Every query of the console uses an index: SQLite's plan scans no growing table."""

import pytest
from sqlalchemy.dialects import sqlite

from holdfast.core.ledger import Ledger
from holdfast.core.paths import ledger_url
from holdfast.ui.console import otlp
from holdfast.ui.console.queries import decisions, metrics, nodes, now

QUERIES = {
    "active": (now.active_query(), "ix_runs_by_state"),
    "failed": (now.failed_query(), "ix_runs_by_state"),
    "first runs": (now.runs_query(None, 50), "ix_runs_by_start"),
    "older runs": (now.runs_query([1000.0, "run-1"], 50), "ix_runs_by_start"),
    "events of a kind": (now.kind_query("decision", 50, 10_000), "ix_events_of_a_kind"),
    "evaluations": (now.evaluations_query([1000.0, "e"], 50), "ix_evaluations_by_start"),
    "nodes": (nodes.nodes_query("node-1", 50), "sqlite_autoindex_nodes_1"),
    "runs by state": (metrics.states_query(), "ix_runs_by_state"),
    "incidents of runs": (metrics.incidents_query(["a", "b"]), "ix_incidents_run_id"),
    "cordoned nodes": (metrics.cordoned_nodes_query(), "sqlite_autoindex_nodes_1"),
    "new events": (otlp.rows_query(otlp.KEYS[0], 5, 9), "INTEGER PRIMARY KEY"),
    "new incidents": (otlp.rows_query(otlp.KEYS[1], 5, 9), "INTEGER PRIMARY KEY"),
    "actions": (decisions.actions_query(1000, 50), "INTEGER PRIMARY KEY"),
}


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    with Ledger.open(ledger_url(tmp_path_factory.mktemp("plans"))) as ledger:
        yield ledger


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_walks_its_index_and_sorts_nothing_unbounded(ledger, name):
    query, index = QUERIES[name]
    options = {"literal_binds": True}
    text = str(query.compile(dialect=sqlite.dialect(), compile_kwargs=options))
    with ledger.bounded_reading(60.0) as reading:
        plan = [row[3] for row in reading.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}")]
    assert any(index in step for step in plan), plan
    assert not [step for step in plan if step.startswith("SCAN") and "USING" not in step], plan
    if name != "active":  # two states of an index are merged by a sort of the runs that go on
        assert not [step for step in plan if step.startswith("USE TEMP B-TREE")], plan
