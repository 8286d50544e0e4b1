"""Add the tables of incident memories, learned rules, and the output of good runs."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Create the tables, and a full-text index of the kind that the database offers."""
    op.create_table(
        "memories",
        sa.Column("memory_id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("incident_id", sa.Integer, unique=True, index=True),
        sa.Column("run_id", sa.String(64), nullable=False),
        sa.Column("remembered_at_s", sa.Float(53), nullable=False),
        sa.Column("reason", sa.String(32), nullable=False),
        sa.Column("category", sa.String(32), nullable=False),
        sa.Column("confidence", sa.Float(53), nullable=False),
        sa.Column("rule_id", sa.String(255), nullable=False),
        sa.Column("scope", sa.JSON, nullable=False),
        sa.Column("fingerprint", sa.String(32), nullable=False, index=True),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("done", sa.Text, nullable=False),
        sa.Column("roots", sa.JSON, nullable=False),
        sa.Column("lines", sa.JSON, nullable=False),
        sa.Column("words", sa.Text, nullable=False),
        sa.Column("verdict", sa.String(16), nullable=False),
        sa.Column("true_reason", sa.String(32), nullable=False),
        sa.Column("true_action", sa.String(32), nullable=False),
        sa.Column("judged_by", sa.String(255), nullable=False),
        sa.Column("judged_at_s", sa.Float(53)),
        sa.Column("embedding", sa.LargeBinary),
        sa.Column("embedding_model", sa.String(255), nullable=False),
    )
    op.create_table(
        "learned_rules",
        sa.Column("rule_id", sa.String(255), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("body", sa.JSON, nullable=False),
        sa.Column("author", sa.String(255), nullable=False),
        sa.Column("sources", sa.JSON, nullable=False),
        sa.Column("made_at_s", sa.Float(53), nullable=False),
        sa.Column("withdrawn_at_s", sa.Float(53)),
        sa.Column("withdrawn_by", sa.String(255), nullable=False),
    )
    op.create_table(
        "good_runs",
        sa.Column("good_id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("fingerprint", sa.String(32), nullable=False, index=True),
        sa.Column("added_at_s", sa.Float(53), nullable=False),
        sa.Column("lines", sa.JSON, nullable=False),
    )
    dialect = op.get_context().dialect.name
    if dialect == "postgresql":
        op.execute(
            "CREATE INDEX ix_memories_words ON memories USING gin (to_tsvector('simple', words))"
        )
    elif dialect == "sqlite" and _has_fts5():
        op.execute("CREATE VIRTUAL TABLE memory_words USING fts5(words)")


def downgrade() -> None:
    """Delete the tables, and the full-text index."""
    if op.get_context().dialect.name == "sqlite":
        op.execute("DROP TABLE IF EXISTS memory_words")
    op.drop_table("good_runs")
    op.drop_table("learned_rules")
    op.drop_table("memories")


def _has_fts5() -> bool:
    # A SQLite may be built without FTS5. The ledger must open there, too; search then uses LIKE.
    found = op.get_bind().execute(sa.text("SELECT 1 FROM pragma_module_list WHERE name = 'fts5'"))
    return found.first() is not None
