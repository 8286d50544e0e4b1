"""Store memories of incidents, learned rules and good runs, with full-text search."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Table, and_, case, func, inspect, select, text, true

from holdfast.core.errors import NotFound
from holdfast.core.ledger import schema
from holdfast.core.ledger.records import GoodRun, Incident, LearnedRule, Memory

R = TypeVar("R", Incident, Memory, LearnedRule, GoodRun)


class Remembered(ABC):
    """The part of `Ledger` with the tables `memories`, `learned_rules` and `good_runs`."""

    _engine: Engine

    @abstractmethod
    def _write(self) -> AbstractContextManager[Connection]:
        """Open a transaction that writes; implemented by `Ledger`."""

    @abstractmethod
    def _as_ledger_error(self, verb: str) -> AbstractContextManager[None]:
        """Convert errors of the database to `LedgerError`; `verb` is part of the message."""

    @abstractmethod
    def _read(
        self, record: type[R], table: Table, where: Any = None, order_by: Any = None
    ) -> list[R]:
        """Return the selected rows of a table as instances of `record`; implemented by `Ledger`."""

    @abstractmethod
    def _update(self, table: Table, where: Any, changes: dict[str, Any]) -> bool:
        """Change the selected rows; return False if no row was selected."""

    def add_memory(self, memory: Memory) -> int:
        """Store a `Memory` of an incident, and return its id.

        An incident of a run has only one memory. If the ledger already has the memory, nothing is
        stored, and the id of the existing memory is returned.
        """
        table = schema.memories
        with self._write() as connection:
            if memory.incident_id is not None:
                same = select(table.c.memory_id).where(table.c.incident_id == memory.incident_id)
                if (there := connection.execute(same).scalar()) is not None:
                    return int(there)
            key = self._insert_new(connection, table, asdict(memory), "memory_id")
            self._index_words(connection, key, memory.words)
        return key

    def set_memory(self, memory_id: int, **changes: Any) -> None:
        """Change columns of a memory.

        Raises:
            NotFound: the ledger has no memory with this id.
        """
        table = schema.memories
        with self._write() as connection:
            if not connection.execute(
                table.update().where(table.c.memory_id == memory_id).values(**changes)
            ).rowcount:
                raise _no_memory(memory_id)
            if "words" in changes:
                self._index_words(connection, memory_id, changes["words"])

    def memory(self, memory_id: int) -> Memory:
        """Return the memory with this id.

        Raises:
            NotFound: the ledger has no memory with this id.
        """
        found = self._read(Memory, schema.memories, schema.memories.c.memory_id == memory_id)
        if not found:
            raise _no_memory(memory_id)
        return found[0]

    def memories(
        self,
        *,
        incident_id: int | None = None,
        judged: bool | None = None,
        newest: int | None = None,
    ) -> list[Memory]:
        """Return memories, oldest first.

        Args:
            incident_id: return only the memory of this incident; None: of all incidents.
            judged: True for only the memories with a person's verdict, False for only the memories
                without one, None for both.
            newest: return only this many memories, the newest ones; None: all.
        """
        table = schema.memories
        where: Any = true()
        if incident_id is not None:
            where = and_(where, table.c.incident_id == incident_id)
        if judged is not None:
            where = and_(where, table.c.verdict != "" if judged else table.c.verdict == "")
        if newest is not None:
            last = (
                select(table.c.memory_id)
                .where(where)
                .order_by(table.c.memory_id.desc())
                .limit(newest)
            )
            where = table.c.memory_id.in_(last.scalar_subquery())
        return self._read(Memory, table, where, order_by=table.c.memory_id)

    def incidents_not_remembered(self) -> list[Incident]:
        """Return the runs' incidents that have no memory yet, oldest first."""
        known = select(schema.memories.c.incident_id).where(
            schema.memories.c.incident_id.is_not(None)
        )
        table = schema.incidents
        return self._read(
            Incident, table, table.c.incident_id.not_in(known), order_by=table.c.incident_id
        )

    def search_memories(self, words: Sequence[str], limit: int) -> list[int]:
        """Return the ids of the memories that contain any of the words, best match first.

        Matches are ranked by BM25 (FTS5) on SQLite and by `ts_rank` on PostgreSQL. On a SQLite
        without FTS5 they are ranked by the number of words found.

        Args:
            words: words of lower-case letters, digits and `_`; other words are ignored.
            limit: the most ids to return.
        """
        given = [word for word in dict.fromkeys(words) if word.replace("_", "").isalnum()]
        if not given:
            return []
        with self._as_ledger_error("read"), self._engine.connect() as connection:
            return [int(key) for key in connection.execute(self._search(given, limit)).scalars()]

    def add_learned_rule(self, rule: LearnedRule) -> None:
        """Record a learned rule; replace an earlier rule with the same id, withdrawn or not."""
        table = schema.learned_rules
        with self._write() as connection:
            connection.execute(table.delete().where(table.c.rule_id == rule.rule_id))
            connection.execute(table.insert().values(**asdict(rule)))

    def withdraw_learned_rule(self, rule_id: str, *, at_s: float, by: str) -> None:
        """Withdraw a learned rule from use.

        Raises:
            NotFound: no rule with this id is in use.
        """
        table = schema.learned_rules
        in_use = (table.c.rule_id == rule_id) & table.c.withdrawn_at_s.is_(None)
        if not self._update(table, in_use, {"withdrawn_at_s": at_s, "withdrawn_by": by}):
            raise NotFound(
                f"There is no learned rule {rule_id!r} in use. `holdfast rules ls --learned` lists those there are."
            )

    def learned_rules(
        self, kind: str | None = None, *, withdrawn: bool = False
    ) -> list[LearnedRule]:
        """Return the learned rules, oldest first.

        Args:
            kind: only rules of this kind; None: all kinds.
            withdrawn: True for the withdrawn rules, False for the rules in use.
        """
        table = schema.learned_rules
        where: Any = (
            table.c.withdrawn_at_s.is_not(None) if withdrawn else table.c.withdrawn_at_s.is_(None)
        )
        if kind is not None:
            where = and_(where, table.c.kind == kind)
        return self._read(LearnedRule, table, where, order_by=(table.c.made_at_s, table.c.rule_id))

    def add_good_run(self, run: GoodRun) -> int:
        """Record the output of a good run, and return its id; equal output is recorded once."""
        table = schema.good_runs
        with self._write() as connection:
            same = select(table.c.good_id).where(table.c.fingerprint == run.fingerprint)
            if (there := connection.execute(same).scalar()) is not None:
                return int(there)
            return self._insert_new(connection, table, asdict(run), "good_id")

    def good_runs(self) -> list[GoodRun]:
        """Return the good runs, oldest first."""
        return self._read(GoodRun, schema.good_runs, order_by=schema.good_runs.c.good_id)

    def _search(self, words: Sequence[str], limit: int) -> Any:
        table = schema.memories
        if self._full_text == "fts5":
            query = text(
                f"SELECT rowid FROM {schema.MEMORY_WORDS} WHERE {schema.MEMORY_WORDS} MATCH :words "
                f"ORDER BY bm25({schema.MEMORY_WORDS}), rowid DESC LIMIT :limit"
            )
            return query.bindparams(words=" OR ".join(f'"{word}"' for word in words), limit=limit)
        if self._full_text == "tsvector":
            kept = func.to_tsvector(text("'simple'"), table.c.words)
            ts_query = func.to_tsquery(text("'simple'"), " | ".join(words))
            rank = func.ts_rank(kept, ts_query)
            return (
                select(table.c.memory_id)
                .where(kept.bool_op("@@")(ts_query))
                .order_by(rank.desc(), table.c.memory_id.desc())
                .limit(limit)
            )
        padded = " " + table.c.words + " "
        has = [padded.contains(f" {word} ", autoescape=True) for word in words]
        count = sum((case((one, 1), else_=0) for one in has[1:]), start=case((has[0], 1), else_=0))
        counted = (
            select(table.c.memory_id)
            .where(count > 0)
            .order_by(count.desc(), table.c.memory_id.desc())
        )
        return counted.limit(limit)

    @functools.cached_property
    def _full_text(self) -> str:
        """The database's kind of full-text search: `fts5`, `tsvector`, or empty for none."""
        if self._engine.dialect.name == "postgresql":
            return "tsvector"
        return "fts5" if inspect(self._engine).has_table(schema.MEMORY_WORDS) else ""

    def _index_words(self, connection: Connection, memory_id: int, words: str) -> None:
        if self._full_text == "fts5":
            connection.execute(
                text(f"DELETE FROM {schema.MEMORY_WORDS} WHERE rowid = :id"), {"id": memory_id}
            )
            insert = text(f"INSERT INTO {schema.MEMORY_WORDS} (rowid, words) VALUES (:id, :words)")
            connection.execute(insert, {"id": memory_id, "words": words})

    @staticmethod
    def _insert_new(connection: Connection, table: Table, values: dict[str, Any], key: str) -> int:
        del values[key]
        made = connection.execute(table.insert().values(**values)).inserted_primary_key
        assert made is not None
        return int(made[0])


def _no_memory(memory_id: int) -> NotFound:
    return NotFound(
        f"There is no incident m{memory_id}. `holdfast incidents ls` lists those there are."
    )
