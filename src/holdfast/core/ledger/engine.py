"""Open, create and migrate the ledger's database, and configure how its transactions begin."""

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Table, create_engine, event, inspect, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError

from holdfast.core.errors import BadUse, LedgerError
from holdfast.core.ledger import schema

BUSY_TIMEOUT_S = 5.0
SERVER_LIMITS = {"connect_timeout": 5, "tcp_user_timeout": 8000}
"""Limits of PostgreSQL's client library: seconds to connect, milliseconds to an acknowledgement."""
_ADVISORY_LOCK = 0x686F6C64
"""The key of the PostgreSQL lock for creating or migrating a ledger, which is `hold` in ASCII."""
_NAMED = 5
"""The most running runs and evaluations that an error message names."""


def open_engine(url: str) -> Engine:
    """Open the ledger at a SQLAlchemy URL, and create or migrate its tables as needed.

    If a crash interrupts the creation or the migration, the ledger stays unchanged.

    Raises:
        LedgerError: the ledger cannot be opened, or a newer Holdfast wrote it.
    """
    engine = None
    try:
        engine = _engine(url)
        with _migration_lock(engine):
            _bring_up_to_date(engine)
    except (ArgumentError, NoSuchModuleError, DBAPIError, OSError, ImportError) as error:
        _dispose(engine)
        raise _cannot_be_opened(url, error) from error
    except BaseException:
        _dispose(engine)
        raise
    return engine


def add_if_missing(connection: Connection, table: Table, row: Mapping[str, Any]) -> None:
    """Insert a row, unless a row with the same key exists."""
    # Lazy: the import of a dialect that is not used would take 40 ms of each command.
    insert: Any
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import insert
    else:
        from sqlalchemy.dialects.sqlite import insert
    connection.execute(insert(table).values(**row).on_conflict_do_nothing())


def downgrade_ledger(url: str, revision: str, *, force: bool = False) -> dict[str, int]:
    """Migrate a ledger back to the version of an earlier Holdfast.

    If the migration fails or a crash interrupts it, the ledger stays unchanged. If this Holdfast
    uses the ledger afterwards, it migrates the ledger to the newest version again.

    Args:
        url: the SQLAlchemy URL of the ledger.
        revision: the version, such as `0005`.
        force: True to delete records that the version cannot hold, and to migrate a ledger with
            running runs or evaluations.

    Returns:
        The deleted tables, each with the number of its records.

    Raises:
        BadUse: the ledger cannot be migrated to this version, or `force` is needed.
        LedgerError: the ledger cannot be opened, or a newer Holdfast wrote it.
    """
    engine = None
    try:
        engine = _engine(url)
        with _migration_lock(engine), writing(engine).begin() as connection:
            _lock_on_server(connection)
            return _downgrade(connection, revision, force=force)
    except (ArgumentError, NoSuchModuleError, DBAPIError, OSError, ImportError) as error:
        raise _cannot_be_opened(url, error) from error
    finally:
        _dispose(engine)


def _downgrade(connection: Connection, revision: str, *, force: bool) -> dict[str, int]:
    now = _revision(connection)
    if now is None:
        raise BadUse("There is no ledger yet. Name another with --ledger URL.")
    _refuse_newer(connection, now)
    is_number = len(revision) == len(now) and revision.isdecimal()
    if not is_number or not "0001" <= revision < now:
        raise BadUse(
            f"The ledger is of version {now}, and cannot be changed to version {revision!r}. "
            "Give an earlier version, as the error of the earlier Holdfast names it."
        )
    going = [] if force else _going(connection)
    if going:
        raise BadUse(
            f"{', '.join(going[:_NAMED])} {'is' if len(going) == 1 else 'are'} recorded as running. "
            "Stop them, or give --force if none of them runs any more."
        )
    before = _counts(connection)
    from holdfast.core.ledger.migrations import downgrade

    downgrade(connection, revision)
    left = _tables(connection)
    deleted = {table: count for table, count in before.items() if table not in left}
    lost = [f"{count} in {table}" for table, count in deleted.items() if count]
    if lost and not force:
        # The error rolls the transaction back.
        raise BadUse(
            f"Version {revision} cannot hold these records: {', '.join(lost)}. Back up the ledger, "
            "then give --force to delete the records."
        )
    return deleted


def _going(connection: Connection) -> list[str]:
    found = []
    for name in ("run", "evaluation"):
        if f"{name}s" in _tables(connection):
            query = text(f"SELECT {name}_id FROM {name}s WHERE state = 'running' ORDER BY 1")
            found += [f"{name} {one}" for one in connection.execute(query).scalars()]
    return found


def _tables(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names()) & set(schema.metadata.tables)


def _counts(connection: Connection) -> dict[str, int]:
    return {
        table: int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())
        for table in sorted(_tables(connection))
    }


def writing(engine: Engine) -> Engine:
    """Return the engine with an option for transactions that write.

    Such a transaction waits for the database's write lock when the transaction begins.
    """
    return engine.execution_options(holdfast_writes=True)


def first_line(error: Exception) -> str:
    """Return the first line of the database driver's message, which has the reason of the error."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return next(iter(str(cause).splitlines()), type(cause).__name__)


def is_unreachable(engine: Engine, error: DBAPIError) -> bool:
    """Return True if the error is a lost or refused connection to the ledger's server."""
    if engine.dialect.name == "sqlite":
        return False
    if error.connection_invalidated:
        return True
    # A broken connection has no SQLSTATE. A server that is starting, is stopping or accepts no more
    # connections returns one of these codes (PostgreSQL's manual, appendix A).
    state = getattr(error.orig, "sqlstate", None)
    return isinstance(error, OperationalError) and (
        state is None or state.startswith(("08", "57P", "53300"))
    )


def _engine(url: str) -> Engine:
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        # A server that restarts or does not answer must cause an error soon, so that training
        # continues without records.
        limits = SERVER_LIMITS if parsed.get_backend_name() == "postgresql" else {}
        return create_engine(parsed, pool_pre_ping=True, connect_args=limits)
    if parsed.database and parsed.database != ":memory:":
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(parsed, connect_args={"timeout": BUSY_TIMEOUT_S})

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        # `_begin` below begins transactions, not the driver. The driver would begin none before
        # CREATE TABLE, so a killed migration would leave a ledger that neither opens nor migrates.
        # SQLAlchemy's SQLite dialect: "Enabling Non-Legacy SQLite Transactional Modes".
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A writer waits for the lock at once. A transaction that reads first and then writes would
        # fail without a wait (SQLITE_BUSY_SNAPSHOT) if another process wrote in between.
        writes = connection.get_execution_options().get("holdfast_writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


@contextmanager
def _migration_lock(engine: Engine) -> Iterator[None]:
    """Hold a lock, so that only one process at a time creates or migrates a SQLite ledger."""
    database = engine.url.database
    if engine.url.get_backend_name() != "sqlite" or not database or database == ":memory:":
        yield
        return
    with Path(f"{database}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _bring_up_to_date(engine: Engine) -> None:
    with engine.connect() as connection:
        if _revision(connection) == schema.REVISION:
            return
    with writing(engine).begin() as connection:
        _lock_on_server(connection)
        revision = _revision(connection)
        if revision is not None:
            _refuse_newer(connection, revision)
        from holdfast.core.ledger.migrations import upgrade

        upgrade(connection)


def _lock_on_server(connection: Connection) -> None:
    """Take a lock so that only one process at a time creates or migrates a PostgreSQL ledger."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})


def _refuse_newer(connection: Connection, revision: str) -> None:
    if revision > schema.REVISION:
        raise LedgerError(
            f"The ledger {connection.engine.url} is of version {revision}; this Holdfast supports up "
            f"to {schema.REVISION}. Upgrade Holdfast, name another ledger with --ledger URL, or "
            f"run with the newer Holdfast: holdfast ledger downgrade {schema.REVISION}"
        )


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _cannot_be_opened(url: str, error: Exception) -> LedgerError:
    return LedgerError(
        f"The ledger {_shown(url)} cannot be opened: {first_line(error)}. "
        "Name another with --ledger URL, or a writable folder with HOLDFAST_HOME."
    )


def _shown(url: str) -> str:
    """Return the URL without its password, for error messages."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return repr(url.rpartition("@")[2])


def _dispose(engine: Engine | None) -> None:
    if engine is not None:
        engine.dispose()
