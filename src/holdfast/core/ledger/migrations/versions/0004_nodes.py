"""Add the table of the nodes that were tested or cordoned."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "nodes",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("cordoned_at_s", sa.Float(53)),
        sa.Column("cordoned_by", sa.String(255), nullable=False),
        sa.Column("cordon_kind", sa.String(8), nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sa.Column("probability", sa.Float(53)),
        sa.Column("tested_at_s", sa.Float(53)),
        sa.Column("verdicts", sa.JSON, nullable=False),
    )


def downgrade() -> None:
    """Delete the table."""
    op.drop_table("nodes")
