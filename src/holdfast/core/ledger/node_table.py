"""The ledger's operations on nodes: verdicts of tests, and which nodes are cordoned."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from sqlalchemy import Connection, select

from holdfast.core.errors import BadUse, NotFound
from holdfast.core.ledger import schema
from holdfast.core.ledger.records import VERDICTS_KEPT, NodeRecord


class NodeTable(ABC):
    """A part of `Ledger`: the table `nodes`."""

    @abstractmethod
    def _write(self) -> AbstractContextManager[Connection]:
        """A transaction that writes."""

    @abstractmethod
    def _as_ledger_error(self, verb: str) -> AbstractContextManager[None]:
        """The database's errors as the ledger's own."""

    @abstractmethod
    def _read(self, record: Any, table: Any, where: Any = None, order_by: Any = None) -> list[Any]:
        """The rows of a table as records."""

    def nodes(self) -> list[NodeRecord]:
        """Return the nodes that were tested or cordoned, by name."""
        return self._read(NodeRecord, schema.nodes, order_by=schema.nodes.c.name)

    def node(self, name: str) -> NodeRecord:
        """Return the node of this name.

        Raises:
            NotFound: no such node was tested or cordoned.
        """
        found = self._read(NodeRecord, schema.nodes, schema.nodes.c.name == name)
        if not found:
            raise _no_node(name)
        node: NodeRecord = found[0]
        return node

    def add_verdict(
        self,
        name: str,
        *,
        at_s: float,
        outcome: str,
        probability: float,
        evidence: str,
        by: str,
        is_hard: bool = False,
        cordons: bool = False,
    ) -> None:
        """Record what a test says of a node, and cordon the node where `cordons`; one cordoned before stays so.

        Args:
            name: of the node.
            at_s: when, Unix seconds.
            outcome: `good`, `bad` or `suspect`.
            probability: that the node is faulty.
            evidence: one sentence.
            by: the run or the user whose test it is.
            is_hard: whether a check of the node by itself failed.
            cordons: whether the node is cordoned from now on.
        """
        verdict = {
            "at_s": at_s,
            "outcome": outcome,
            "probability": probability,
            "evidence": evidence,
            "by": by,
            "is_hard": is_hard,
        }
        with self._write() as connection:
            known = _known(connection, name)
            changes: dict[str, Any] = {
                "probability": probability,
                "tested_at_s": at_s,
                "verdicts": [*known["verdicts"], verdict][-VERDICTS_KEPT:],
            }
            if cordons and known["cordoned_at_s"] is None:
                changes |= {"cordoned_at_s": at_s, "cordoned_by": by, "why": evidence}
            _change(connection, name, changes)

    def cordon(self, name: str, *, at_s: float, by: str, why: str) -> None:
        """Launch nothing on a node from now on, for the reason `why`; a later reason replaces an earlier one."""
        with self._write() as connection:
            _known(connection, name)
            changes = {"cordoned_at_s": at_s, "cordoned_by": by, "why": why}
            _change(connection, name, changes)

    def return_node(self, name: str, *, force: bool = False) -> None:
        """Let jobs be launched on a cordoned node again; a node that is not cordoned stays as it is.

        Args:
            name: of the node.
            force: also without a test that the node has passed since.

        Raises:
            NotFound: no such node was tested or cordoned.
            BadUse: no test has found the node good since it was cordoned.
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
    """Return the row of a node, which is made where there is none."""
    table = schema.nodes
    row = connection.execute(select(table).where(table.c.name == name)).mappings().first()
    if row is not None:
        return dict(row)
    empty: dict[str, Any] = {
        "name": name,
        "cordoned_at_s": None,
        "cordoned_by": "",
        "why": "",
        "probability": None,
        "tested_at_s": None,
        "verdicts": [],
    }
    connection.execute(table.insert().values(**empty))
    return empty


def _change(connection: Connection, name: str, changes: Mapping[str, Any]) -> None:
    table = schema.nodes
    connection.execute(table.update().where(table.c.name == name).values(**changes))


def _no_node(name: str) -> NotFound:
    return NotFound(f"There is no node {name!r}. `holdfast nodes ls` lists those there are.")
