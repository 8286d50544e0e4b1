"""Back up and restore a ledger by the commands of docs/records.md, while the ledger is written."""

import os
import re
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest
from ledger_records import EVENT, INCIDENT, RUN
from sqlalchemy.engine import make_url

from holdfast.core.ledger import Ledger
from holdfast.core.ledger.records import Memory
from holdfast.core.paths import ledger_url
from holdfast.testing.postgresql import PrivatePostgreSQL, postgresql_binaries

TEXT = Path(__file__).parents[2].joinpath("docs/records.md").read_text("utf-8")
MEMORY = Memory(
    remembered_at_s=1.0,
    reason="Unknown",
    category="Unknown",
    confidence=0.5,
    words="watchdog timeout",
)


def documented(start):
    """Return the line of the documentation that begins with a command."""
    (line,) = [one for one in TEXT.splitlines() if one.startswith(start)]
    return line


def fill(ledger):
    ledger.add_run(RUN)
    ledger.add_events([EVENT] * 3)
    ledger.add_incident(INCIDENT)
    ledger.add_memory(MEMORY)


def check(url):
    """Check that a restored ledger has the records, and that it takes further ones."""
    with Ledger.open(url) as ledger:
        assert ledger.runs() == [RUN]
        assert ledger.events("a") == [EVENT] * 3
        (incident,) = ledger.incidents()
        assert ledger.search_memories(["watchdog"], 5) == [1]
        assert ledger.add_incident(INCIDENT) > incident.incident_id
        ledger.add_event(EVENT)
        assert len(ledger.events("a")) == 4


def run(folder, *lines, environment=None):
    for line in lines:
        subprocess.run(line, shell=True, check=True, cwd=folder, env=environment)


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="no sqlite3 is installed")
def test_an_sqlite_ledger_is_backed_up_in_use_and_restored(tmp_path):
    url = ledger_url(tmp_path / ".holdfast")
    with Ledger.open(url) as ledger:
        fill(ledger)
        database = sqlite3.connect(tmp_path / ".holdfast" / "ledger.db", isolation_level=None)
        database.execute("BEGIN IMMEDIATE")
        database.execute("DELETE FROM events")
        run(tmp_path, documented("sqlite3 "))
        database.execute("COMMIT")
        database.close()
        assert ledger.events("a") == []
        # The processes that have the old file open are killed: its companions stay.
        for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
            shutil.copy(tmp_path / ".holdfast" / name, tmp_path / name)
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
        shutil.copy(tmp_path / name, tmp_path / ".holdfast" / name)
    run(tmp_path, documented("rm -f .holdfast/ledger.db "), documented("cp ledger-backup.db"))
    check(url)


def test_a_postgresql_ledger_is_backed_up_in_use_and_restored(tmp_path):
    pytest.importorskip("psycopg")
    binaries = postgresql_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server is installed")
    with PrivatePostgreSQL() as server, Ledger.open(server.new_database()) as ledger:
        fill(ledger)
        here = make_url(ledger.url)
        environment = {
            **os.environ,
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "PGHOST": str(server.folder),
            "PGUSER": "holdfast",
        }
        dump = documented("pg_dump ")
        dump = dump.replace("postgresql://user@host/database", f"dbname={here.database}")
        with ledger._write() as connection:
            connection.exec_driver_sql("DELETE FROM events")
            run(tmp_path, dump, environment=environment)
        assert ledger.events("a") == []
        run(
            tmp_path,
            documented("createdb "),
            documented("pg_restore "),
            environment=environment,
        )
        restored = re.search(r"--dbname=(\w+)", documented("pg_restore ")).group(1)
        check(here.set(database=restored).render_as_string(hide_password=False))
