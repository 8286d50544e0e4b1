"""Add the table of people's actions, and the indexes for the console's time-limited queries."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Create the table and the indexes."""
    op.create_table(
        "actions",
        sa.Column("action_id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("key", sa.String(64), nullable=False, unique=True),
        sa.Column("at_s", sa.Float(53), nullable=False),
        sa.Column("by", sa.String(255), nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("what", sa.String(16), nullable=False),
        sa.Column("target", sa.String(255), nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sa.Column("seen", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
    )
    op.create_index("ix_events_of_a_kind", "events", ["kind", "event_id"])
    op.create_index("ix_runs_by_state", "runs", ["state", "started_at_s"])
    op.create_index("ix_runs_by_start", "runs", ["started_at_s", "run_id"])
    op.create_index("ix_evaluations_by_start", "evaluations", ["started_at_s", "evaluation_id"])


def downgrade() -> None:
    """Delete the indexes and the table."""
    op.drop_index("ix_evaluations_by_start", "evaluations")
    op.drop_index("ix_runs_by_start", "runs")
    op.drop_index("ix_runs_by_state", "runs")
    op.drop_index("ix_events_of_a_kind", "events")
    op.drop_table("actions")
