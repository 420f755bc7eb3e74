"""Makes the next version of the server: this one, whose tables have a version more."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from eagle_eye.server.store.schema import NEWEST_VERSION

REPOSITORY = Path(__file__).parents[2]
LATER = f'''"""What the next version adds."""

from alembic import op
from sqlalchemy import Column, Integer

revision = "9000"
down_revision = "{NEWEST_VERSION}"
keeps_older_servers = True


def upgrade():
    op.add_column("actions", Column("later", Integer, nullable=False, server_default="0"))
    op.create_table("later", Column("id", Integer, primary_key=True))
'''


def next_version(folder: Path) -> str:
    """Return the Python of the next version, made in the folder."""
    shutil.copytree(REPOSITORY / "server/eagle_eye", folder / "server/eagle_eye")
    store = folder / "server/eagle_eye/server/store"
    (store / "migrations/versions/v9000_later.py").write_text(LATER, encoding="utf-8")
    schema, number = (store / "schema.py").read_text(encoding="utf-8"), f'NEWEST_VERSION = "{NEWEST_VERSION}"'
    assert number in schema
    (store / "schema.py").write_text(schema.replace(number, 'NEWEST_VERSION = "9000"'), encoding="utf-8")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder}/server exec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return str(python)
