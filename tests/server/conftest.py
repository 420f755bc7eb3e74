"""The two engines that records are kept in: what the store promises is tested on both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.demo.two_servers import postgresql_programs
from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.store.sql_store import SqlStore, open_file, open_records
from tests.server.postgresql_server import Opens, PostgresqlServer, serving

ENGINES = ("sqlite", "postgresql")


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """A PostgreSQL server; skips where its programs are not installed."""
    bin_ = postgresql_programs()
    if bin_ is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql-15)")
    with serving(bin_) as server:
        yield server


@pytest.fixture(params=ENGINES)
def opens(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opens]:
    """What opens the same records again and again, as servers and commands beside each other do."""
    if request.param == "sqlite":
        yield lambda: open_file(tmp_path / "records.db")
        return
    url = request.getfixturevalue("postgresql").new_database()
    yield lambda: open_records(RecordsSettings(url), tmp_path)


@pytest.fixture
def store(opens: Opens) -> Iterator[SqlStore]:
    """Records that are new, on each engine."""
    made = opens()
    yield made
    made.close()
