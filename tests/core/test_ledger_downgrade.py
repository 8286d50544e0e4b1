"""Migrate a ledger with records in every table down to nothing and up again, on both databases."""

import json
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner
from ledger_records import RUN
from sqlalchemy import BigInteger, Float, Integer, LargeBinary, create_engine, inspect, select

import json_schemas
from holdfast.cli.main import cli
from holdfast.core.errors import BadUse, LedgerError
from holdfast.core.ledger import Ledger, downgrade_ledger, migrations, schema
from holdfast.core.ledger.engine import open_engine
from holdfast.core.ledger.records import Memory
from holdfast.core.paths import ledger_url
from holdfast.testing.postgresql import PrivatePostgreSQL, postgresql_binaries

MEMORY = Memory(remembered_at_s=1.0, reason="Unknown", category="Unknown", confidence=0.5)
TABLES = schema.metadata.sorted_tables
ADDED = {
    "0001": {"runs", "attempts", "events", "incidents", "checkpoints"},
    "0002": {"evaluations", "priors"},
    "0003": {"memories", "learned_rules", "good_runs"},
    "0004": {"nodes"},
    "0005": {"leads", "meetings"},
    "0006": {"actions"},
}
"""The tables that each version has added."""


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("psycopg")
    if postgresql_binaries() is None:
        pytest.skip("no PostgreSQL server is installed")
    with PrivatePostgreSQL() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return ledger_url(tmp_path)
    return request.getfixturevalue("server").new_database()


def value(column):
    if column.foreign_keys:
        return "r1"
    if isinstance(column.type, Float):
        return 1.25
    if isinstance(column.type, BigInteger):
        return 1 << 40
    if isinstance(column.type, Integer):
        return 1
    if isinstance(column.type, LargeBinary):
        return b"\x00\xff"
    if str(column.type) == "JSON":
        return {"é": [1, None]}
    return "r1" if column.name == "run_id" else f"{column.name[:6]}é"


def fill(url):
    """Add one record to every table, with a value in every column."""
    engine = open_engine(url)
    with engine.begin() as connection:
        for table in TABLES:
            connection.execute(table.insert().values({one.name: value(one) for one in table.c}))
    engine.dispose()


def contents(connection):
    present = set(inspect(connection).get_table_names())
    return {
        table.name: [dict(row) for row in connection.execute(select(table)).mappings()]
        for table in TABLES
        if table.name in present
    }


def shape(connection):
    """Return the columns and the indexes of each table."""
    found = inspect(connection)
    return {
        table: (
            [(one["name"], str(one["type"])) for one in found.get_columns(table)],
            sorted(str(one["name"]) for one in found.get_indexes(table)),
        )
        for table in found.get_table_names()
    }


def test_each_version_down_and_up_keeps_what_the_earlier_version_can_hold(url):
    assert set().union(*ADDED.values()) == set(schema.metadata.tables)
    assert max(ADDED) == schema.REVISION
    fill(url)
    engine = open_engine(url)
    with engine.connect() as connection:
        whole, before = contents(connection), shape(connection)
    assert {len(rows) for rows in whole.values()} == {1}
    for earlier in ["0005", "0004", "0003", "0002", "0001", "base"]:
        with engine.begin() as connection:
            migrations.downgrade(connection, earlier)
        held = set().union(*(tables for one, tables in ADDED.items() if one <= earlier != "base"))
        with engine.connect() as connection:
            assert contents(connection) == {name: whole[name] for name in held}
    with engine.connect() as connection:
        assert inspect(connection).get_table_names() == ["alembic_version"]
        assert inspect(connection).get_view_names() == []
    engine.dispose()
    fill(url)
    engine = open_engine(url)
    with engine.connect() as connection:
        assert (contents(connection), shape(connection)) == (whole, before)
    engine.dispose()


@pytest.mark.parametrize("version", ["0002", "0005"])
def test_after_down_and_up_the_ledger_works_and_has_its_records(url, version):
    fill(url)
    with Ledger.open(url) as ledger:
        before = (ledger.runs(), ledger.attempts("r1"), ledger.incidents())
    deleted = downgrade_ledger(url, version, force=True)
    later = set().union(*(tables for one, tables in ADDED.items() if one > version))
    assert deleted == dict.fromkeys(sorted(later), 1)
    with Ledger.open(url) as ledger:
        assert (ledger.runs(), ledger.attempts("r1"), ledger.incidents()) == before
        assert len(ledger.nodes()) == (version >= "0004")
        assert len(ledger.memories()) == (version >= "0003")
        if version < "0003":
            new = ledger.add_memory(replace(MEMORY, words="watchdog timeout"))
            assert ledger.search_memories(["watchdog"], 5) == [new]


@pytest.fixture
def sqlite(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    return ledger_url(tmp_path)


def version_of(url):
    engine = create_engine(url)
    with engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    engine.dispose()
    return found


def test_no_record_is_deleted_without_force(sqlite):
    fill(sqlite)
    with pytest.raises(BadUse, match="cannot hold these records: 1 in actions, 1 in leads"):
        downgrade_ledger(sqlite, "0004")
    assert version_of(sqlite) == schema.REVISION
    with Ledger.open(sqlite) as ledger, ledger.bounded_reading(5.0) as reading:
        assert {len(rows) for rows in contents(reading).values()} == {1}


def test_a_ledger_in_use_is_not_changed(sqlite):
    with Ledger.open(sqlite) as ledger:
        ledger.add_run(RUN)
    with pytest.raises(BadUse, match="run a is recorded as running"):
        downgrade_ledger(sqlite, "0005")
    assert downgrade_ledger(sqlite, "0005", force=True) == {"actions": 0}
    with Ledger.open(sqlite) as ledger:
        ledger.set_run("a", state="completed")
    assert downgrade_ledger(sqlite, "0005") == {"actions": 0}
    assert version_of(sqlite) == "0005"


@pytest.mark.parametrize("version", ["0006", "0000", "base", "1", "9999", "-001"])
def test_only_an_earlier_version_is_taken(sqlite, version):
    Ledger.open(sqlite).close()
    with pytest.raises(BadUse, match="is of version 0006, and cannot be changed"):
        downgrade_ledger(sqlite, version)


def test_a_newer_ledger_is_refused_with_the_command_that_helps(sqlite):
    engine = open_engine(sqlite)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0007'")
    engine.dispose()
    for use in (Ledger.open, lambda url: downgrade_ledger(url, "0005")):
        with pytest.raises(LedgerError, match=r"newer Holdfast: holdfast ledger downgrade 0006$"):
            use(sqlite)


KILLED = """
import os, signal, sys
from holdfast.core.ledger import downgrade_ledger, migrations
whole = migrations.downgrade
def killed(connection, revision):
    whole(connection, revision)
    os.kill(os.getpid(), signal.SIGKILL)
migrations.downgrade = killed
downgrade_ledger(sys.argv[1], "0001", force=True)
"""


def test_a_migration_back_that_is_killed_changes_nothing(url):
    fill(url)
    ended = subprocess.run([sys.executable, "-c", KILLED, url], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert version_of(url) == schema.REVISION
    with Ledger.open(url) as ledger, ledger.bounded_reading(60.0) as reading:
        found = contents(reading)
    assert (len(found), {len(rows) for rows in found.values()}) == (len(TABLES), {1})


def test_the_command_lists_what_it_deleted(sqlite):
    Ledger.open(sqlite).close()
    fill(sqlite)
    said = CliRunner().invoke(cli, ["ledger", "downgrade", "0005", "--force"])
    assert said.output.splitlines() == [
        "The ledger is of version 0005.",
        "Deleted: 1 record of the table actions.",
    ]
    said = CliRunner().invoke(cli, ["ledger", "downgrade", "0004", "--force", "--json"])
    answer = json_schemas.check(json.loads(said.output))
    assert (answer["ledger_version"], answer["deleted"]) == ("0004", {"leads": 1, "meetings": 1})
