"""Records in PostgreSQL: what is wrong is said in one line, a server on it works, a site moves there."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from eagle_eye.cli.main import main
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server import config as configuration
from eagle_eye.server.admin import records_command
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.model.errors import CopyFailed, StoreUnavailable
from eagle_eye.server.model.records import AuditEntry
from eagle_eye.server.store import schema
from eagle_eye.server.store.postgresql import PostgresqlDatabase
from eagle_eye.server.store.schema import metadata
from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.store.sql_store import SqliteFile, SqlStore, open_file
from eagle_eye.server.store.store import DELIVERIES, INCIDENTS, Change
from tests.server.builders import NOW, FakeClock, event, frame, incident, running, subscription
from tests.server.postgresql_server import PASSWORD, USER, Opens, PostgresqlServer, as_replica


def opened(url: str, password_file: Path | None = None, *, alone: bool = False) -> SqlStore:
    """Return the records at the URL."""
    settings = RecordsSettings(url, str(password_file) if password_file else "")
    return SqlStore(PostgresqlDatabase(settings, alone=alone))


def refused(url: str, password_file: Path | None = None) -> str:
    """Return the one line that is said instead of opening."""
    with pytest.raises(StoreUnavailable) as caught:
        opened(url, password_file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def url(postgresql: PostgresqlServer) -> str:
    return postgresql.new_database()


def test_a_password_comes_from_its_file_and_is_never_told(
    postgresql: PostgresqlServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = postgresql.new_database_over_tcp()
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text(f"{PASSWORD}\n", encoding="utf-8")
    wrong.write_text("not-it", encoding="utf-8")
    opened(url, right).close()
    said = refused(url, wrong), refused(url), refused(url, tmp_path / "missing")
    assert "password authentication failed" in said[0]
    assert all("records.password_file" in line for line in said)
    assert "not-it" not in "".join((*said, *capfd.readouterr()))


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda url: url.replace("/records_", "/nothing_"), "createdb --encoding UTF8 NAME"),
        (lambda url: url.replace(f"//{USER}@", "//nobody@"), "createuser NAME"),
        (lambda url: url.replace("host=", "host=/nowhere"), "must run and be reachable at records.url"),
        (lambda url: f"{url}&nonsense=1", "no URL that libpq can read"),
        (lambda url: url.replace("host=/", "host=127.0.0.1&sslmode=require#"), "records.url"),
    ],
)
def test_a_wrong_url_is_one_line_with_the_remedy(url: str, change: object, remedy: str) -> None:
    assert callable(change)
    assert remedy in refused(change(url))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://db/records", "expected a URL such as postgresql"),
        ("postgresql://me:secret@db/records", "expected a URL without a password"),
        ("postgresql://me@db/records?password=secret", "expected a URL without a password"),
    ],
)
def test_a_url_that_cannot_be_is_a_wrong_configuration_without_its_secret(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        configuration.load(None, {}, {"records.url": url})
    assert "secret" not in str(caught.value)


def test_a_newer_servers_records_are_refused(postgresql: PostgresqlServer, url: str) -> None:
    opened(url).close()
    postgresql.execute("UPDATE alembic_version SET version_num = '9999'", url.partition("@/")[2].partition("?")[0])
    assert f"version 9999, this server knows up to {schema.NEWEST_VERSION}: start the newer server" in refused(url)


def test_another_encoding_is_refused(postgresql: PostgresqlServer) -> None:
    options = "ENCODING 'SQL_ASCII' LOCALE_PROVIDER libc LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    assert "createdb --encoding UTF8" in refused(postgresql.new_database(options))


def test_a_replica_is_refused_and_one_that_was_the_primary_is_left(postgresql: PostgresqlServer, url: str) -> None:
    name = url.partition("@/")[2].partition("?")[0]
    store = opened(url)
    store.commit(Change(incidents=(incident(),)))
    postgresql.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    assert "target_session_attrs=read-write" in refused(url)
    for pool in (store._writes, store._reads):
        pool.dispose()
    with pytest.raises(StoreUnavailable, match="read-only or in recovery"):
        store.probe()
    assert store.open_incidents() == [incident()]
    postgresql.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    store.probe()
    store.close()


def test_a_database_in_recovery_is_refused(postgresql: PostgresqlServer, url: str) -> None:
    opened(url).close()
    with as_replica(postgresql):
        assert "is read-only or in recovery (a replica)" in refused(url)


def test_one_process_at_a_time_has_the_records_alone_and_commands_beside_it(url: str) -> None:
    server = opened(url, alone=True)
    with pytest.raises(StoreUnavailable, match="in use by another process"):
        opened(url, alone=True)
    beside = opened(url)
    beside.commit(Change(incidents=(incident(),)))
    beside.close()
    assert server.open_incidents() == [incident()]
    server.close()
    opened(url, alone=True).close()


def test_a_restart_of_the_database_loses_nothing_and_is_over_at_the_next_use(
    postgresql: PostgresqlServer, url: str
) -> None:
    store = opened(url, alone=True)
    store.commit(Change(incidents=(incident("a"),)))
    postgresql.control("stop", "--wait", "--mode=fast")
    with pytest.raises(StoreUnavailable, match="must run and be reachable"):
        store.commit(Change(incidents=(incident("lost"),)))
    with pytest.raises(StoreUnavailable, match="must run and be reachable"):
        store.open_incidents()
    postgresql.control("start", "--wait")
    store.commit(Change(incidents=(incident("b"),)))
    assert [one.id for one in store.open_incidents()] == ["a", "b"]
    store.close()


def test_the_audit_trail_cannot_be_changed(postgresql: PostgresqlServer, url: str) -> None:
    store = opened(url)
    store.commit(Change(audit=(AuditEntry(time_s=NOW, who="local", verb="exclude", subject="n1"),)))
    name = url.partition("@/")[2].partition("?")[0]
    for statement in ("DELETE FROM audit", "UPDATE audit SET record = ''", "TRUNCATE audit"):
        with pytest.raises(psycopg.errors.RaiseException, match="append-only"):
            postgresql.execute(statement, name)
    assert [entry.subject for entry in store.audit().items] == ["n1"]
    store.close()


def test_who_reads_while_the_records_are_closed_leaves_no_connection_open(url: str) -> None:
    store = opened(url)
    reading = store._reads.raw_connection()
    driver = reading.driver_connection
    store.close()
    reading.close()
    late = store._reads.raw_connection()
    late_driver = late.driver_connection
    late.close()
    assert driver is not None
    assert late_driver is not None
    assert (driver.closed, late_driver.closed) == (True, True)


def test_who_reads_while_the_old_primary_is_left_leaves_no_connection_open(
    postgresql: PostgresqlServer, url: str
) -> None:
    name = url.partition("@/")[2].partition("?")[0]
    store = opened(url)
    reading = store._reads.raw_connection()
    driver = reading.driver_connection
    store._writes.dispose()
    postgresql.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    with pytest.raises(StoreUnavailable, match="read-only or in recovery"):
        store.probe()
    reading.close()
    assert driver is not None
    assert driver.closed
    store.close()


@pytest.mark.filterwarnings("ignore:.*expression-based index")
@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
def test_what_the_migrations_make_is_what_the_code_expects(
    request: pytest.FixtureRequest, tmp_path: Path, engine: str
) -> None:
    if engine == "sqlite":
        database: SqliteFile | PostgresqlDatabase = SqliteFile(tmp_path / "records.db")
    else:
        url = request.getfixturevalue("postgresql").new_database()
        database = PostgresqlDatabase(RecordsSettings(url), alone=False)
    pool = database.connections(1, writing=True)
    schema.migrate(database, pool)
    with pool.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), metadata)
    pool.dispose()
    # What an index on an expression is on, each engine tells in its own words, or not at all; who may use the tables is
    # the migrations' own, as the version is.
    known = ("Index('audit_", "Table('oldest_readers'")
    assert [one for one in differences if not any(name in str(one) for name in known)] == []


def test_a_server_serves_records_in_postgresql(tmp_path: Path, url: str) -> None:
    with running(tmp_path, FakeClock(), records__url=url) as server:
        assert server.send(frame_body(1)).status_code == 200
        server.dispatcher.services.store.commit(
            Change(subscriptions=(subscription(),), incidents=(incident(),), events=(event(),))
        )
        assert [one["id"] for one in server.client.get("/api/v1/incidents").json()["items"]] == ["inc_1"]
        assert server.client.get("/api/v1/incidents?node=n1&state=confirmed").json()["items"] != []
        assert [one["node"] for one in server.client.get("/api/v1/nodes").json()["items"]] == ["n1"]
        assert server.client.get("/readyz").json()["checks"]["storage"] == "ok"
    assert not (tmp_path / "records.db").exists()


def frame_body(sequence: int) -> bytes:
    from tests.server.builders import body

    return body(frame(sequence))


def test_the_commands_find_the_records_by_the_servers_configuration(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.toml"
    file.write_text(f'data_dir = "{tmp_path}/data"\n[records]\nurl = "{url}"\n', encoding="utf-8")
    assert main(["tokens", "create", "--scope", "read", "--config", str(file)]) == 0
    assert main(["tokens", "list", "--config", str(file)]) == 0
    assert "read" in capsys.readouterr().out
    assert main(["backup", str(tmp_path / "backup"), "--records-only", "--config", str(file)]) == 2
    assert "pg_dump" in capsys.readouterr().err
    config = msgspec.to_builtins(configuration.load(file, {}, {}))
    assert config["records"] == {
        "url": url,
        "password_file": "",
        "lease_s": 5.0,
        "async_ok": False,
        "server_url": "",
        "cell": "default",
    }
    assert isinstance(configuration.load(file, {}, {}), ServerConfig)


class Broken(Exception):
    """The copy is broken off here."""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with some thousand records, of which the newest change is deleted."""
    store = open_file(tmp_path / "site/records.db")
    store.commit(Change(subscriptions=(subscription(),), events=(event(),)))
    store.commit(Change(incidents=tuple(incident(f"inc_{number}", summary="\0") for number in range(2_500))))
    store.commit(Change(audit=(AuditEntry(time_s=NOW, who="local", verb="exclude", subject="n1"),)))
    store.close()
    with closing(sqlite3.connect(tmp_path / "site/records.db")) as other, other:
        other.execute("DELETE FROM changes WHERE sequence = (SELECT max(sequence) FROM changes)")
    return tmp_path / "site"


def test_a_copy_that_is_broken_off_goes_on_and_the_counts_are_checked(
    site: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = records_command._rows

    def breaking(table: object, *more: object) -> Iterator[object]:
        for number, rows in enumerate(parts(table, *more)):  # type: ignore[arg-type]
            if getattr(table, "name", "") == "incidents" and number == 2:
                raise Broken
            yield rows

    monkeypatch.setattr(records_command, "_rows", breaking)
    target = PostgresqlDatabase(RecordsSettings(url), alone=True)
    with pytest.raises(Broken):
        records_command.copy_records(SqliteFile(site / "records.db"), target)
    monkeypatch.setattr(records_command, "_rows", parts)
    assert main(["records", "copy", "--from", f"sqlite:{site}", "--to", url, "--json"]) == 0
    said = {one["table"]: one for one in msgspec.json.decode(capsys.readouterr().out)}
    assert said["incidents"] == {"table": "incidents", "rows": 2_500, "copied": 500}
    before, after = open_file(site / "records.db"), opened(url)
    assert after.page(DELIVERIES, {}) == before.page(DELIVERIES, {})
    assert after.page(INCIDENTS, {}, limit=10).next == before.page(INCIDENTS, {}, limit=10).next
    assert after.audit() == before.audit()
    for store in (before, after):
        store.commit(Change(incidents=(incident("new"),)))
    # A number that was given out is not given out again.
    assert after.change_range()[1] == before.change_range()[1]
    before.close()
    after.close()


def test_a_database_with_other_records_is_refused_and_left_alone(site: Path, url: str) -> None:
    store = opened(url)
    store.commit(Change(incidents=(incident("other"),)))
    store.close()
    target = PostgresqlDatabase(RecordsSettings(url), alone=True)
    with pytest.raises(CopyFailed, match="other records"):
        records_command.copy_records(SqliteFile(site / "records.db"), target)
    store = opened(url)
    assert [one.id for one in store.all(INCIDENTS)] == ["other"]
    assert store.change_range() == (1, 1)
    store.close()


def test_nothing_is_copied_from_a_folder_that_has_no_records(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["records", "copy", "--from", f"sqlite:{tmp_path}", "--to", url]) == 2
    assert "holds no records.db" in capsys.readouterr().err


def test_records_of_several_processes_are_one(opens: Opens) -> None:
    first, second = opens(), opens()
    first.commit(Change(incidents=(incident("a"),)))
    second.commit(Change(incidents=(incident("b"),)))
    assert first.all(INCIDENTS) == second.all(INCIDENTS)
    first.close()
    second.close()
