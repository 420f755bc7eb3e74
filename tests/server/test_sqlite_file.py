"""Records in a SQLite file: whose it is, what is wrong with one, and that commits are on disk."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.records import AuditEntry
from eagle_eye.server.store import database
from eagle_eye.server.store.sql_store import SqlStore, open_file
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, incident


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    made = open_file(tmp_path / "records.db")
    yield made
    made.close()


ANOTHER_PROCESS = """
import sys
from pathlib import Path
from eagle_eye.server.store.sql_store import open_file
from eagle_eye.server.store.store import INCIDENTS, Change
from tests.server.builders import incident
store = open_file(Path(sys.argv[1]))
store.commit(Change(incidents=(incident(id=sys.argv[2]),)))
print(*sorted(one.id for one in store.open_incidents()))
store.close()
"""


def test_a_process_that_opens_the_file_and_leaves_takes_nothing_with_it(tmp_path: Path, store: SqlStore) -> None:
    def another(incident_id: str) -> str:
        command = [sys.executable, "-c", ANOTHER_PROCESS, str(tmp_path / "records.db"), incident_id]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert another("inc_a").split() == ["inc_a"]
    assert [one.id for one in store.open_incidents()] == ["inc_a"]
    store.commit(Change(incidents=(incident(id="inc_b"),)))
    assert another("inc_c").split() == ["inc_a", "inc_b", "inc_c"]
    assert sorted(one.id for one in store.open_incidents()) == ["inc_a", "inc_b", "inc_c"]


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    open_file(tmp_path / "records.db").close()
    assert stat.S_IMODE((tmp_path / "records.db").stat().st_mode) == 0o600


def test_a_newer_servers_file_is_refused(tmp_path: Path) -> None:
    open_file(tmp_path / "records.db").close()
    connection = sqlite3.connect(tmp_path / "records.db")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreUnavailable, match="version 99"):
        open_file(tmp_path / "records.db")


def test_a_file_that_is_no_database_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "records.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreUnavailable, match=r"put a backup.s in its place \(eagle-eye backup restore\)"):
        open_file(tmp_path / "records.db")


def test_half_a_database_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    open_file(path).close()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(StoreUnavailable, match=r"records.db cannot be .*put a backup's in its place"):
        open_file(path)


def test_a_folder_that_cannot_be_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    with pytest.raises(StoreUnavailable, match="data_dir must be a folder"):
        open_file(tmp_path / "data" / "records.db")


def test_commits_are_durable_by_configuration(tmp_path: Path) -> None:
    connection = database.connect(tmp_path / "any.db")
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_the_log_that_a_large_transaction_made_long_is_short_again(tmp_path: Path) -> None:
    connection, log = database.connect(tmp_path / "any.db"), tmp_path / "any.db-wal"
    connection.execute("CREATE TABLE t (one BLOB)")
    usual_bytes = 1_000 * 4_096

    def commit(size: int, times: int) -> None:
        for _ in range(times):
            with database.transaction(connection):
                connection.execute("INSERT INTO t VALUES (randomblob(?))", (size,))

    commit(4 * usual_bytes, 1)
    assert log.stat().st_size > 4 * usual_bytes
    commit(4_096, 10)
    assert log.stat().st_size <= usual_bytes
    connection.close()


def test_the_audit_trail_cannot_be_changed(tmp_path: Path, store: SqlStore) -> None:
    store.commit(Change(audit=(AuditEntry(time_s=NOW, who="local", verb="exclude", subject="n1"),)))
    other = sqlite3.connect(tmp_path / "records.db")
    for statement in ("DELETE FROM audit", "UPDATE audit SET record = ''"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            other.execute(statement)
    other.close()
    assert [entry.subject for entry in store.audit().items] == ["n1"]
