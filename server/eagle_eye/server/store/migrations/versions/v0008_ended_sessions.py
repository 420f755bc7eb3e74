"""Whose sessions were ended before their time, and until when they had begun."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Double, Integer, Text

revision = "0008"
down_revision = "0007"
keeps_older_servers = True


def upgrade() -> None:
    """Make the table."""
    text = Text().with_variant(Text(collation="C"), "postgresql")
    op.create_table(
        "ended_sessions",
        Column("rowid", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
        Column("person", text, nullable=False, unique=True),
        Column("ended_s", Double, nullable=False),
        Column("record", Text, nullable=False),
        sqlite_autoincrement=True,
    )
