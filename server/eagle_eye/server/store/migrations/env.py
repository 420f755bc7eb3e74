"""Alembic's way in: migrates over the connection that ``migration.migrate`` hands it."""

from alembic import context

from eagle_eye.server.store.schema import metadata

# Batches: SQLite changes a column only by copying the table.
context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
context.run_migrations()
