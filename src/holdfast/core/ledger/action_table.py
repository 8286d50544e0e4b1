"""Store the actions of people in the ledger, one record for each action, for audits."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Literal

from sqlalchemy import Connection, select
from sqlalchemy.exc import IntegrityError

from holdfast.core.ledger import schema
from holdfast.core.ledger.records import ActionRecord


class ActionTable(ABC):
    """The part of `Ledger` that stores people's actions, in the table `actions`."""

    @abstractmethod
    def _write(self) -> AbstractContextManager[Connection]:
        """Open a transaction that writes; implemented by `Ledger`."""

    @abstractmethod
    def _read(self, record: Any, table: Any, where: Any = None, order_by: Any = None) -> list[Any]:
        """Return the selected rows of a table as instances of `record`; implemented by `Ledger`."""

    def add_action(self, action: ActionRecord) -> int | None:
        """Record an action before the action begins, and return the new record's id.

        Returns:
            The id; None if any process has already recorded an action with the same key.
        """
        values = asdict(action)
        del values["action_id"]
        table = schema.actions
        with self._write() as connection:
            same = select(table.c.action_id).where(table.c.key == action.key)
            if connection.execute(same).first() is not None:
                return None
            try:
                # A savepoint: on PostgreSQL another console may record the same key meanwhile.
                with connection.begin_nested():
                    key = connection.execute(table.insert().values(**values)).inserted_primary_key
            except IntegrityError:
                return None
        assert key is not None
        return int(key[0])

    def end_action(self, action_id: int, state: Literal["done", "refused"], outcome: str) -> None:
        """Record the result of an action, unless the action already has a result."""
        table = schema.actions
        with self._write() as connection:
            connection.execute(
                table.update()
                .where(table.c.action_id == action_id, table.c.state == "asked")
                .values(state=state, outcome=outcome)
            )

    def action(self, key: str) -> ActionRecord | None:
        """Return the action with this key; None if there is none."""
        found = self._read(ActionRecord, schema.actions, schema.actions.c.key == key)
        return found[0] if found else None
