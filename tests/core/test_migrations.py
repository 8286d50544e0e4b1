import re

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect

from holdfast.core.errors import LedgerError
from holdfast.core.ledger import Ledger, migrations, schema
from holdfast.core.ledger.engine import open_engine
from holdfast.core.paths import ledger_url


@pytest.fixture
def url(tmp_path):
    return ledger_url(tmp_path)


def test_the_migrations_make_the_tables_of_the_schema(url):
    engine = open_engine(url)
    with engine.connect() as connection:
        options = {
            "compare_type": True,
            "compare_server_default": True,
            # The full-text index of SQLite makes tables of its own.
            "include_name": lambda name, kind, _: (
                kind != "table" or not str(name).startswith(schema.MEMORY_WORDS)
            ),
        }
        assert (
            compare_metadata(MigrationContext.configure(connection, opts=options), schema.metadata)
            == []
        )
        for table in schema.metadata.tables.values():
            found = inspect(connection).get_foreign_keys(table.name)
            assert [key["options"] for key in found] == [{"ondelete": "CASCADE"}] * len(
                table.foreign_keys
            )
    engine.dispose()


def test_the_newest_migration_is_the_schemas_revision(url):
    engine = open_engine(url)
    with engine.connect() as connection:
        assert MigrationContext.configure(connection).get_current_revision() == schema.REVISION
    engine.dispose()


def test_a_ledger_of_a_newer_holdfast_is_refused(url):
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    engine.dispose()
    with pytest.raises(
        LedgerError,
        match=re.escape(f"is of version 9999; this Holdfast supports up to {schema.REVISION}"),
    ):
        Ledger.open(url)


def test_a_migration_that_breaks_off_leaves_nothing_behind(url, monkeypatch):
    whole = migrations.upgrade

    def broken(connection):
        whole(connection)
        raise OSError("power cut")

    monkeypatch.setattr(migrations, "upgrade", broken)
    with pytest.raises(LedgerError, match="power cut"):
        Ledger.open(url)
    monkeypatch.undo()
    with Ledger.open(url) as ledger:
        assert ledger.runs() == []
