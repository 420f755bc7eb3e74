"""The database's timeline as the lease was written last: another one means that the database failed over."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column

revision = "0004"
down_revision = "0003"
keeps_older_servers = True


def upgrade() -> None:
    """Add the column; 0 is not known."""
    op.add_column("lease", Column("timeline", BigInteger, nullable=False, server_default="0"))
