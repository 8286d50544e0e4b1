"""Migrate a ledger to another version with Alembic, in the caller's transaction."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection


def upgrade(connection: Connection) -> None:
    """Migrate the ledger behind `connection` to the newest revision."""
    command.upgrade(_config(connection), "head")


def downgrade(connection: Connection, revision: str) -> None:
    """Migrate the ledger behind `connection` back to a revision; `base` removes all tables."""
    command.downgrade(_config(connection), revision)


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
