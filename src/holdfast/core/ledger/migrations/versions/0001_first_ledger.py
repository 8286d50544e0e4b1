"""Create the tables of the first version: runs, attempts, events, incidents, checkpoints."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def _run_id(*, primary_key: bool = False) -> sa.Column[str]:
    key = sa.ForeignKey("runs.run_id", ondelete="CASCADE")
    return sa.Column(
        "run_id", sa.String(64), key, primary_key=primary_key, nullable=False, index=not primary_key
    )


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "runs",
        sa.Column("run_id", sa.String(64), primary_key=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("command", sa.JSON, nullable=False),
        sa.Column("options", sa.JSON, nullable=False),
        sa.Column("cwd", sa.Text, nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("started_at_s", sa.Float(53), nullable=False),
        sa.Column("ended_at_s", sa.Float(53)),
        sa.Column("exit_code", sa.Integer),
        sa.Column("outcome", sa.Text, nullable=False),
    )
    op.create_table(
        "attempts",
        _run_id(primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("started_at_s", sa.Float(53), nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("start_step", sa.Integer),
        sa.Column("first_step_at_s", sa.Float(53)),
        sa.Column("last_step", sa.Integer),
        sa.Column("ended_at_s", sa.Float(53)),
    )
    op.create_table(
        "events",
        sa.Column("event_id", sa.Integer, primary_key=True, autoincrement=True),
        _run_id(),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("at_s", sa.Float(53), nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("rank", sa.Integer),
        sa.Column("data", sa.JSON, nullable=False),
    )
    op.create_table(
        "incidents",
        sa.Column("incident_id", sa.Integer, primary_key=True, autoincrement=True),
        _run_id(),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("rank", sa.Integer),
        sa.Column("step", sa.Integer),
        sa.Column("fault_at_s", sa.Float(53), nullable=False),
        sa.Column("detected_at_s", sa.Float(53), nullable=False),
        sa.Column("diagnosis", sa.JSON, nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("explanation", sa.Text, nullable=False),
        sa.Column("resumed_at_s", sa.Float(53)),
        sa.Column("restored_step", sa.Integer),
    )
    op.create_table(
        "checkpoints",
        sa.Column("checkpoint_id", sa.Integer, primary_key=True, autoincrement=True),
        _run_id(),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("stall_s", sa.Float(53), nullable=False),
        sa.Column("committed_at_s", sa.Float(53), nullable=False),
        sa.UniqueConstraint("run_id", "attempt", "step", "path"),
    )


def downgrade() -> None:
    """Delete the tables; the tables that refer to `runs` come first."""
    op.drop_table("checkpoints")
    op.drop_table("incidents")
    op.drop_table("events")
    op.drop_table("attempts")
    op.drop_table("runs")
