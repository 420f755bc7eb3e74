"""The silences: for a time people get no news of some incidents."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Double, Integer, Text

revision = "0006"
down_revision = "0005"
keeps_older_servers = True


def upgrade() -> None:
    """Make the table."""
    text = Text().with_variant(Text(collation="C"), "postgresql")
    op.create_table(
        "silences",
        Column("rowid", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
        Column("id", text, nullable=False, unique=True),
        Column("state", text, nullable=False),
        Column("until_s", Double, nullable=False),
        Column("record", Text, nullable=False),
        sqlite_autoincrement=True,
    )
