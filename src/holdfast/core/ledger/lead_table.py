"""Store which supervisor leads a run, and the address at which the run's nodes meet."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from sqlalchemy import Connection, select

from holdfast.core.ledger import schema
from holdfast.core.ledger.engine import add_if_missing
from holdfast.core.ledger.records import Lead, MeetingPlace


class LeadTable(ABC):
    """The part of `Ledger` with the tables `leads` and `meetings`."""

    @abstractmethod
    def _write(self) -> AbstractContextManager[Connection]:
        """Open a transaction that writes; implemented by `Ledger`."""

    @abstractmethod
    def _read(self, record: Any, table: Any, where: Any = None, order_by: Any = None) -> list[Any]:
        """Return the selected rows of a table as instances of `record`; implemented by `Ledger`."""

    def lead(self, run_id: str) -> Lead:
        """Return the newest lead of a run; before the first supervisor, a lead of generation 0.

        Raises:
            LedgerError: the ledger cannot be read.
        """
        found = self._read(Lead, schema.leads, schema.leads.c.run_id == run_id)
        return found[0] if found else Lead(run_id=run_id, generation=0, node_id="", beats=0)

    def take_lead(self, before: Lead, node_id: str) -> Lead | None:
        """Record a new supervisor as the leader of a run, in place of the leader in `before`.

        Args:
            before: the lead that the caller has read.
            node_id: the node that starts the new supervisor.

        Returns:
            The new lead; None if another node took the lead first, or if the old leader has sent a
            heartbeat since `before` was read.

        Raises:
            LedgerError: the ledger cannot be written.
        """
        table = schema.leads
        with self._write() as connection:
            none = {"run_id": before.run_id, "generation": 0, "node_id": "", "beats": 0}
            add_if_missing(connection, table, none)
            is_same = (
                (table.c.run_id == before.run_id)
                & (table.c.generation == before.generation)
                & (table.c.beats == before.beats)
            )
            after = Lead(
                run_id=before.run_id, generation=before.generation + 1, node_id=node_id, beats=0
            )
            changed = connection.execute(table.update().where(is_same).values(**vars(after)))
        return after if changed.rowcount else None

    def beat(self, run_id: str, generation: int) -> bool:
        """Record a heartbeat of a supervisor; return True if the supervisor still leads.

        Raises:
            LedgerError: the ledger cannot be written.
        """
        table = schema.leads
        is_ours = (table.c.run_id == run_id) & (table.c.generation == generation)
        with self._write() as connection:
            beaten = table.update().where(is_ours).values(beats=table.c.beats + 1)
            if connection.execute(beaten).rowcount:
                return True
            newest = select(table.c.generation).where(table.c.run_id == run_id)
            found = connection.execute(newest).scalar()
        return found is None or found < generation

    def publish_meeting(self, place: MeetingPlace) -> None:
        """Record the address at which a run's nodes meet; replace the key's earlier record.

        Raises:
            LedgerError: the ledger cannot be written.
        """
        table = schema.meetings
        with self._write() as connection:
            connection.execute(table.delete().where(table.c.key == place.key))
            connection.execute(table.insert().values(**vars(place)))

    def meeting(self, key: str) -> MeetingPlace | None:
        """Return the address at which the nodes meet; None if there is no record.

        Raises:
            LedgerError: the ledger cannot be read.
        """
        found = self._read(MeetingPlace, schema.meetings, schema.meetings.c.key == key)
        return found[0] if found else None

    def remove_meeting(self, key: str) -> None:
        """Delete the record of the address at which the nodes met.

        Raises:
            LedgerError: the ledger cannot be written.
        """
        table = schema.meetings
        with self._write() as connection:
            connection.execute(table.delete().where(table.c.key == key))
