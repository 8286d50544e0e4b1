"""Define the ledger's tables, in portable SQL.

A change to the tables needs a migration in `migrations/versions` and a new `REVISION`.
`tests/core/test_migrations.py` compares the tables with the result of the migrations.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

REVISION = "0006"
"""The number of the newest migration, after which a ledger has these tables."""

metadata = MetaData()

RUN_KEY = "runs.run_id"

runs = Table(
    "runs",
    metadata,
    Column("run_id", String(64), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("command", JSON, nullable=False),
    Column("options", JSON, nullable=False),
    Column("cwd", Text, nullable=False),
    Column("host", String(255), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("started_at_s", Float(53), nullable=False),
    Column("ended_at_s", Float(53)),
    Column("exit_code", Integer),
    Column("outcome", Text, nullable=False),
    Index("ix_runs_by_state", "state", "started_at_s"),
    Index("ix_runs_by_start", "started_at_s", "run_id"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("run_id", ForeignKey(RUN_KEY, ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("started_at_s", Float(53), nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("start_step", Integer),
    Column("first_step_at_s", Float(53)),
    Column("last_step", Integer),
    Column("ended_at_s", Float(53)),
)

events = Table(
    "events",
    metadata,
    Column("event_id", Integer, primary_key=True, autoincrement=True),
    Column("run_id", ForeignKey(RUN_KEY, ondelete="CASCADE"), nullable=False, index=True),
    Column("attempt", Integer, nullable=False),
    Column("at_s", Float(53), nullable=False),
    Column("kind", String(64), nullable=False),
    Column("rank", Integer),
    Column("data", JSON, nullable=False),
    Index("ix_events_of_a_kind", "kind", "event_id"),
)

incidents = Table(
    "incidents",
    metadata,
    Column("incident_id", Integer, primary_key=True, autoincrement=True),
    Column("run_id", ForeignKey(RUN_KEY, ondelete="CASCADE"), nullable=False, index=True),
    Column("attempt", Integer, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("rank", Integer),
    Column("step", Integer),
    Column("fault_at_s", Float(53), nullable=False),
    Column("detected_at_s", Float(53), nullable=False),
    Column("diagnosis", JSON, nullable=False),
    Column("action", String(32), nullable=False),
    Column("explanation", Text, nullable=False),
    Column("resumed_at_s", Float(53)),
    Column("restored_step", Integer),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("checkpoint_id", Integer, primary_key=True, autoincrement=True),
    Column("run_id", ForeignKey(RUN_KEY, ondelete="CASCADE"), nullable=False, index=True),
    Column("attempt", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("path", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("stall_s", Float(53), nullable=False),
    Column("committed_at_s", Float(53), nullable=False),
    UniqueConstraint("run_id", "attempt", "step", "path"),
)

# No foreign key to `runs`: an evaluation outlives the run of its checkpoint.
evaluations = Table(
    "evaluations",
    metadata,
    Column("evaluation_id", String(64), primary_key=True),
    Column("suite", String(255), nullable=False),
    Column("model", Text, nullable=False),
    Column("family", String(255), nullable=False),
    Column("state", String(16), nullable=False),
    Column("started_at_s", Float(53), nullable=False),
    Column("folder", Text, nullable=False),
    Column("digest", String(128), nullable=False),
    Column("mode", String(16), nullable=False),
    Column("numerics", Text, nullable=False),
    Column("harness_versions", JSON, nullable=False),
    Column("ended_at_s", Float(53)),
    Column("makespan_s", Float(53)),
    Column("bound_s", Float(53)),
    Column("engines", Integer, nullable=False),
    Column("nodes", Integer, nullable=False),
    Column("engine_seconds", Float(53), nullable=False),
    Column("account", JSON, nullable=False),
    Column("scores", JSON, nullable=False),
    Column("failed_tasks", JSON, nullable=False),
    Column("run_id", String(64), index=True),
    Column("step", Integer),
    Column("outcome", Text, nullable=False),
    Index("ix_evaluations_by_start", "started_at_s", "evaluation_id"),
)

priors = Table(
    "priors",
    metadata,
    Column("prior_id", Integer, primary_key=True, autoincrement=True),
    Column("family", String(255), nullable=False),
    Column("harness", String(64), nullable=False),
    Column("task", String(255), nullable=False),
    Column("recorded_at_s", Float(53), nullable=False),
    Column("evaluation_id", String(64), nullable=False),
    Column("history", LargeBinary, nullable=False),
    Index("ix_priors_of_a_task", "family", "harness", "task"),
)

# No foreign key here either: a memory outlives the run of its incident.
memories = Table(
    "memories",
    metadata,
    Column("memory_id", Integer, primary_key=True, autoincrement=True),
    Column("incident_id", Integer, unique=True, index=True),
    Column("run_id", String(64), nullable=False),
    Column("remembered_at_s", Float(53), nullable=False),
    Column("reason", String(32), nullable=False),
    Column("category", String(32), nullable=False),
    Column("confidence", Float(53), nullable=False),
    Column("rule_id", String(255), nullable=False),
    Column("scope", JSON, nullable=False),
    Column("fingerprint", String(32), nullable=False, index=True),
    Column("action", String(32), nullable=False),
    Column("done", Text, nullable=False),
    Column("roots", JSON, nullable=False),
    Column("lines", JSON, nullable=False),
    Column("words", Text, nullable=False),
    Column("verdict", String(16), nullable=False),
    Column("true_reason", String(32), nullable=False),
    Column("true_action", String(32), nullable=False),
    Column("judged_by", String(255), nullable=False),
    Column("judged_at_s", Float(53)),
    Column("embedding", LargeBinary),
    Column("embedding_model", String(255), nullable=False),
)

MEMORY_WORDS = "memory_words"
"""The name of SQLite's full-text index (FTS5) of `memories.words`.

The index's rowid is the memory's id. A migration creates this virtual table, so the table is not
among the tables below. PostgreSQL has an index of `to_tsvector` instead.
"""

learned_rules = Table(
    "learned_rules",
    metadata,
    Column("rule_id", String(255), primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("body", JSON, nullable=False),
    Column("author", String(255), nullable=False),
    Column("sources", JSON, nullable=False),
    Column("made_at_s", Float(53), nullable=False),
    Column("withdrawn_at_s", Float(53)),
    Column("withdrawn_by", String(255), nullable=False),
)

good_runs = Table(
    "good_runs",
    metadata,
    Column("good_id", Integer, primary_key=True, autoincrement=True),
    Column("name", Text, nullable=False),
    Column("fingerprint", String(32), nullable=False, index=True),
    Column("added_at_s", Float(53), nullable=False),
    Column("lines", JSON, nullable=False),
)

# No foreign key: a node outlives the runs on it.
nodes = Table(
    "nodes",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("cordoned_at_s", Float(53)),
    Column("cordoned_by", String(255), nullable=False),
    Column("cordon_kind", String(8), nullable=False),
    Column("why", Text, nullable=False),
    Column("probability", Float(53)),
    Column("tested_at_s", Float(53)),
    Column("verdicts", JSON, nullable=False),
)

leads = Table(
    "leads",
    metadata,
    Column("run_id", ForeignKey(RUN_KEY, ondelete="CASCADE"), primary_key=True),
    Column("generation", Integer, nullable=False),
    Column("node_id", String(255), nullable=False),
    Column("beats", BigInteger, nullable=False),
)

meetings = Table(
    "meetings",
    metadata,
    Column("key", String(255), primary_key=True),
    Column("run_id", ForeignKey(RUN_KEY, ondelete="CASCADE"), nullable=False),
    Column("hosts", JSON, nullable=False),
    Column("port", Integer, nullable=False),
    Column("token", String(64), nullable=False),
)

# No foreign key: the record of an action outlives the run, the incident or the node.
actions = Table(
    "actions",
    metadata,
    Column("action_id", Integer, primary_key=True, autoincrement=True),
    Column("key", String(64), nullable=False, unique=True),
    Column("at_s", Float(53), nullable=False),
    Column("by", String(255), nullable=False),
    Column("address", String(64), nullable=False),
    Column("what", String(16), nullable=False),
    Column("target", String(255), nullable=False),
    Column("why", Text, nullable=False),
    Column("seen", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("outcome", Text, nullable=False),
)
