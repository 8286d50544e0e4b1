"""Read the ledger under a time limit that the database itself enforces."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError, OperationalError

from holdfast.core.errors import LedgerError

_INSTRUCTIONS = 10_000
"""SQLite checks the time limit after this many instructions, which take under a millisecond."""


class TooSlow(LedgerError):
    """A query took longer than its limit, and the database ended the query."""


@contextmanager
def bounded_reading(engine: Engine, limit_s: float) -> Iterator[Connection]:
    """Open a transaction that only reads and whose queries the database ends at a time limit.

    On SQLite the limit holds for the whole block, on PostgreSQL for each statement.

    Args:
        engine: the engine of the ledger.
        limit_s: the time limit, in seconds.

    Raises:
        TooSlow: a query took longer than `limit_s`.
    """
    with engine.connect() as connection:
        is_sqlite = connection.dialect.name == "sqlite"
        driver: Any = connection.connection.dbapi_connection
        deadline_s = time.monotonic() + limit_s
        if is_sqlite:
            driver.set_progress_handler(lambda: time.monotonic() > deadline_s, _INSTRUCTIONS)
        try:
            if not is_sqlite:
                connection.execute(text("SET TRANSACTION READ ONLY"))
                connection.execute(text(f"SET LOCAL statement_timeout = {round(limit_s * 1000)}"))
            yield connection
        except (OperationalError, DBAPIError) as error:
            if _is_timeout(error):
                raise TooSlow(
                    f"The ledger did not answer within {limit_s:g} s, and the query was ended. "
                    "Try again; if the error remains, check the load of the ledger's disk or server."
                ) from error
            raise
        finally:
            if is_sqlite:
                driver.set_progress_handler(None, 0)


def _is_timeout(error: DBAPIError) -> bool:
    message = str(error.orig)
    return message == "interrupted" or "statement timeout" in message
