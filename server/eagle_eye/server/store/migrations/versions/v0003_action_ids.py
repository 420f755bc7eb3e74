"""What the ids of these records' actions are made with, so that no other database makes the same ones."""

from __future__ import annotations

import secrets

from alembic import op
from sqlalchemy import Column, Text

revision = "0003"
down_revision = "0002"
keeps_older_servers = True


def upgrade() -> None:
    """Make the table and its one row."""
    text = Text().with_variant(Text(collation="C"), "postgresql")
    table = op.create_table("action_ids", Column("salt", text, primary_key=True))
    op.bulk_insert(table, [{"salt": secrets.token_hex(16)}])
