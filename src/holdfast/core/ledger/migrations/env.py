"""Run the migrations over the connection that `upgrade` or `downgrade` passes.

Alembic runs this script.
"""

from alembic import context

from holdfast.core.ledger import schema

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=schema.metadata,
    render_as_batch=True,
)
context.run_migrations()
