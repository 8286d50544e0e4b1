"""Add the tables of evaluations and of the costs of their samples."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "evaluations",
        sa.Column("evaluation_id", sa.String(64), primary_key=True),
        sa.Column("suite", sa.String(255), nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("family", sa.String(255), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("started_at_s", sa.Float(53), nullable=False),
        sa.Column("folder", sa.Text, nullable=False),
        sa.Column("digest", sa.String(128), nullable=False),
        sa.Column("mode", sa.String(16), nullable=False),
        sa.Column("numerics", sa.Text, nullable=False),
        sa.Column("harness_versions", sa.JSON, nullable=False),
        sa.Column("ended_at_s", sa.Float(53)),
        sa.Column("makespan_s", sa.Float(53)),
        sa.Column("bound_s", sa.Float(53)),
        sa.Column("engines", sa.Integer, nullable=False),
        sa.Column("nodes", sa.Integer, nullable=False),
        sa.Column("engine_seconds", sa.Float(53), nullable=False),
        sa.Column("account", sa.JSON, nullable=False),
        sa.Column("scores", sa.JSON, nullable=False),
        sa.Column("failed_tasks", sa.JSON, nullable=False),
        sa.Column("run_id", sa.String(64), index=True),
        sa.Column("step", sa.Integer),
        sa.Column("outcome", sa.Text, nullable=False),
    )
    op.create_table(
        "priors",
        sa.Column("prior_id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("family", sa.String(255), nullable=False),
        sa.Column("harness", sa.String(64), nullable=False),
        sa.Column("task", sa.String(255), nullable=False),
        sa.Column("recorded_at_s", sa.Float(53), nullable=False),
        sa.Column("evaluation_id", sa.String(64), nullable=False),
        sa.Column("history", sa.LargeBinary, nullable=False),
        sa.Index("ix_priors_of_a_task", "family", "harness", "task"),
    )


def downgrade() -> None:
    """Delete the tables."""
    op.drop_table("priors")
    op.drop_table("evaluations")
