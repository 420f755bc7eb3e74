"""Migrations of the records, as Alembic runs them: each in ``versions`` brings a database to the next version."""
