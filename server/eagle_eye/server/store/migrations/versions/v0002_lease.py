"""The lease by which one of several servers on one database leads."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Integer, Text

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Make the table and its one row: nobody leads yet."""
    text = Text().with_variant(Text(collation="C"), "postgresql")
    op.create_table(
        "lease",
        Column("epoch", BigInteger, primary_key=True, autoincrement=False),
        Column("renewals", BigInteger, nullable=False),
        Column("holder", text, nullable=False),
        Column("backend_pid", Integer, nullable=False),
    )
    op.execute("INSERT INTO lease (epoch, renewals, holder, backend_pid) VALUES (0, 0, '', 0)")
