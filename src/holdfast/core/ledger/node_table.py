"""Store the nodes with their test verdicts and their cordons."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from sqlalchemy import Connection, select

from holdfast.core.errors import BadUse, NotFound
from holdfast.core.ledger import schema
from holdfast.core.ledger.engine import add_if_missing
from holdfast.core.ledger.records import VERDICTS_KEPT, CordonKind, NodeRecord, Verdict


class NodeTable(ABC):
    """The part of `Ledger` that stores nodes, in the table `nodes`."""

    @abstractmethod
    def _write(self) -> AbstractContextManager[Connection]:
        """Open a transaction that writes; implemented by `Ledger`."""

    @abstractmethod
    def _as_ledger_error(self, verb: str) -> AbstractContextManager[None]:
        """Convert errors of the database to `LedgerError`; `verb` is part of the message."""

    @abstractmethod
    def _read(self, record: Any, table: Any, where: Any = None, order_by: Any = None) -> list[Any]:
        """Return the selected rows of a table as instances of `record`; implemented by `Ledger`."""

    def nodes(self) -> list[NodeRecord]:
        """Return the nodes that were tested or cordoned, sorted by name."""
        return self._read(NodeRecord, schema.nodes, order_by=schema.nodes.c.name)

    def node(self, name: str) -> NodeRecord:
        """Return the node with this name.

        Raises:
            NotFound: no such node was tested or cordoned.
        """
        found = self._read(NodeRecord, schema.nodes, schema.nodes.c.name == name)
        if not found:
            raise _no_node(name)
        node: NodeRecord = found[0]
        return node

    def add_verdicts(
        self, verdicts: Sequence[Verdict], *, at_s: float, by: str, cordons: Collection[str] = ()
    ) -> None:
        """Record the verdicts of a test session and cordon the nodes in `cordons`, all or nothing.

        A node that is already cordoned stays cordoned. If its cordon is soft and the verdict is
        hard, the verdict becomes the reason of the cordon.

        Args:
            verdicts: one verdict for each node.
            at_s: the time of the session, in Unix seconds.
            by: the run or the user that ran the session.
            cordons: the names of the nodes to cordon.
        """
        with self._write() as connection:
            for verdict in sorted(verdicts, key=lambda one: one.name):  # a fixed order: no deadlock
                row = {key: value for key, value in vars(verdict).items() if key != "name"}
                known = _known(connection, verdict.name)
                changes: dict[str, Any] = {
                    "probability": verdict.probability,
                    "tested_at_s": at_s,
                    "verdicts": [*known["verdicts"], {"at_s": at_s, "by": by, **row}][
                        -VERDICTS_KEPT:
                    ],
                }
                is_worse = verdict.is_hard and known["cordon_kind"] == "soft"
                if verdict.name in cordons and (known["cordoned_at_s"] is None or is_worse):
                    kind: CordonKind = "hard" if verdict.is_hard else "soft"
                    changes |= _cordoned(at_s, by, kind, verdict.evidence)
                _change(connection, verdict.name, changes)

    def cordon(self, name: str, *, at_s: float, by: str, why: str) -> None:
        """Cordon a node for a person, so that no job is launched on the node.

        The reason `why` replaces an earlier reason.
        """
        with self._write() as connection:
            _known(connection, name)
            _change(connection, name, _cordoned(at_s, by, "person", why))

    def return_node(self, name: str, *, force: bool = False) -> None:
        """End the cordon of a node, so that jobs may be launched there again.

        The method does nothing to a node that is not cordoned.

        Args:
            name: the node.
            force: True to return a node that has passed no test since its cordon.

        Raises:
            NotFound: no such node was tested or cordoned.
            BadUse: the node has passed no test since its cordon, and `force` is False.
        """
        node = self.node(name)
        if node.is_cordoned and not node.passed_since and not force:
            raise BadUse(
                f"{name} has passed no test since it was cordoned ({node.why}). Run `holdfast nodes check` on it and "
                "others, or give --force."
            )
        with self._write() as connection:
            _change(connection, name, {"cordoned_at_s": None})


def _known(connection: Connection, name: str) -> Mapping[str, Any]:
    """Return the row of a node, locked for this transaction; create the row if it is missing."""
    table = schema.nodes
    empty: dict[str, Any] = {
        "name": name,
        "cordoned_at_s": None,
        "cordoned_by": "",
        "cordon_kind": "",
        "why": "",
        "probability": None,
        "tested_at_s": None,
        "verdicts": [],
    }
    # Two processes may create the row at the same time.
    add_if_missing(connection, table, empty)
    found = select(table).where(table.c.name == name).with_for_update()
    return dict(connection.execute(found).mappings().one())


def _cordoned(at_s: float, by: str, kind: CordonKind, why: str) -> dict[str, Any]:
    return {"cordoned_at_s": at_s, "cordoned_by": by, "cordon_kind": kind, "why": why}


def _change(connection: Connection, name: str, changes: Mapping[str, Any]) -> None:
    table = schema.nodes
    connection.execute(table.update().where(table.c.name == name).values(**changes))


def _no_node(name: str) -> NotFound:
    return NotFound(f"There is no node {name!r}. `holdfast nodes ls` lists those there are.")
