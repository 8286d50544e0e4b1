"""Add the tables of leads (who supervises a run) and meetings (where a run's nodes meet)."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "leads",
        sa.Column(
            "run_id",
            sa.String(64),
            sa.ForeignKey("runs.run_id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("node_id", sa.String(255), nullable=False),
        sa.Column("beats", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "meetings",
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column(
            "run_id",
            sa.String(64),
            sa.ForeignKey("runs.run_id", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("hosts", sa.JSON, nullable=False),
        sa.Column("port", sa.Integer, nullable=False),
        sa.Column("token", sa.String(64), nullable=False),
    )


def downgrade() -> None:
    """Delete the tables."""
    op.drop_table("meetings")
    op.drop_table("leads")
