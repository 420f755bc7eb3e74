"""The wish of a standby that the leader step down, in the lease's row."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Integer, Text

revision = "0005"
down_revision = "0004"
keeps_older_servers = True


def upgrade() -> None:
    """Add the columns; nobody has wished yet."""
    text = Text().with_variant(Text(collation="C"), "postgresql")
    op.add_column("lease", Column("wish_number", BigInteger, nullable=False, server_default="0"))
    op.add_column("lease", Column("wish_nodes", Integer, nullable=False, server_default="0"))
    op.add_column("lease", Column("wish_holder", text, nullable=False, server_default=""))
