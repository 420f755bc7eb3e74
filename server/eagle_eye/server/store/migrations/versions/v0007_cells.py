"""Cells: the leases of all but the default one, how each cell is, and which jobs it judges."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Double, Integer, Text
from sqlalchemy.sql.schema import SchemaItem

revision = "0007"
down_revision = "0006"
keeps_older_servers = True  # until there is a second cell, whose first server ends that


def upgrade() -> None:
    """Make the tables."""
    text = Text().with_variant(Text(collation="C"), "postgresql")
    op.create_table(
        "cell_leases",
        Column("cell", text, primary_key=True, unique=True),
        Column("epoch", BigInteger, primary_key=True, autoincrement=False),
        Column("renewals", BigInteger, nullable=False),
        Column("holder", text, nullable=False),
        Column("backend_pid", Integer, nullable=False),
        Column("timeline", BigInteger, nullable=False, server_default="0"),
        Column("wish_number", BigInteger, nullable=False, server_default="0"),
        Column("wish_nodes", Integer, nullable=False, server_default="0"),
        Column("wish_holder", text, nullable=False, server_default=""),
    )
    _records("cells", Column("cell", text, nullable=False, unique=True))
    _records(
        "job_cells",
        Column("job", text, nullable=False, unique=True),
        Column("cell", text, nullable=False),
        Column("over_s", Double, nullable=True),
    )


def _records(name: str, *columns: SchemaItem) -> None:
    op.create_table(
        name,
        Column("rowid", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
        *columns,
        Column("record", Text, nullable=False),
        sqlite_autoincrement=True,
    )
