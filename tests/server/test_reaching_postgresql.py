"""How a site reaches its PostgreSQL: over TLS, with libpq's own password file, through a pooler of sessions."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.store.sql_store import SqlStore, open_records
from eagle_eye.server.store.store import Change
from tests.server.builders import incident
from tests.server.postgresql_server import (
    PASSWORD,
    USER,
    PostgresqlServer,
    free_port,
    owned_by_ordinary_user,
    run_as_ordinary_user,
)

_EC = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def opened(url: str) -> SqlStore:
    return open_records(RecordsSettings(url), Path("/-"))


def keeps_records(url: str) -> bool:
    """Return whether an incident that is written there is read back over other connections."""
    with closing(opened(url)) as store:
        store.commit(Change(incidents=(incident(),)))
    with closing(opened(url)) as store:
        return store.open_incidents() == [incident()]


@pytest.fixture
def password_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A password file where libpq looks for it."""
    path = tmp_path / "pgpass"
    path.write_text(f"127.0.0.1:*:*:{USER}:{PASSWORD.replace(':', chr(92) + ':')}\n", encoding="utf-8")
    path.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(path))
    return path


def test_the_password_is_found_where_libpq_looks_for_it(postgresql: PostgresqlServer, password_file: Path) -> None:
    url = postgresql.new_database_over_tcp()
    assert keeps_records(url)
    password_file.write_text(f"127.0.0.1:*:*:{USER}:not-it\n", encoding="utf-8")
    with pytest.raises(StoreUnavailable, match="PGPASSFILE must hold the password of the URL's user"):
        opened(url)


@pytest.fixture
def authorities(postgresql: PostgresqlServer, tmp_path: Path) -> Iterator[Path]:
    """A folder with two authorities; the first issued the certificate that the server shows for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed (apt-get install openssl)")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", "req", *_EC, *words], cwd=tmp_path, check=True, capture_output=True)

    for name in ("right", "wrong"):
        openssl("-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    issued = ("-CA", "right.pem", "-CAkey", "right.key", "-addext", "basicConstraints=CA:FALSE")
    openssl(
        *("-keyout", "server.key", "-out", "server.crt", "-subj", "/CN=database"),
        *(*issued, "-addext", "subjectAltName=IP:127.0.0.1"),
    )
    for name in ("server.key", "server.crt"):
        kept = postgresql.folder / "data" / name
        shutil.copy(tmp_path / name, kept)
        kept.chmod(0o600)
        owned_by_ordinary_user(kept)
    postgresql.execute("ALTER SYSTEM SET ssl = on")
    postgresql.control("reload")
    yield tmp_path
    postgresql.execute("ALTER SYSTEM RESET ssl")
    postgresql.control("reload")


@pytest.mark.usefixtures("password_file")
def test_tls_is_as_the_url_asks(postgresql: PostgresqlServer, authorities: Path) -> None:
    url = postgresql.new_database_over_tcp("&sslmode=verify-full&sslrootcert=")
    assert keeps_records(f"{url}{authorities}/right.pem")
    with pytest.raises(StoreUnavailable, match=r"certificate verify failed.*sslrootcert of records.url must fit"):
        opened(f"{url}{authorities}/wrong.pem")


@pytest.fixture
def pooler(postgresql: PostgresqlServer, tmp_path: Path) -> Iterator[int]:
    """The port of a pooler that gives each client a session for as long as it stays."""
    program = shutil.which("pgbouncer")
    if program is None:
        pytest.skip("PgBouncer is not installed (apt-get install pgbouncer)")
    folder, port = postgresql.folder / f"pooler-{tmp_path.name}", free_port()
    folder.mkdir()
    (folder / "users").write_text(f'"{USER}" "{PASSWORD}"\n', encoding="utf-8")
    (folder / "pooler.ini").write_text(
        f"[databases]\n* = host=127.0.0.1 port={postgresql.port}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
        f"auth_type = scram-sha-256\nauth_file = {folder}/users\npool_mode = session\n"
        f"logfile = {folder}/log\npidfile = {folder}/pid\n",
        encoding="utf-8",
    )
    owned_by_ordinary_user(folder, *folder.iterdir())
    run_as_ordinary_user(program, "--daemon", str(folder / "pooler.ini"))
    yield port
    os.kill(int((folder / "pid").read_text(encoding="ascii")), 15)


@pytest.mark.usefixtures("password_file")
def test_records_are_kept_through_a_pooler_of_sessions(postgresql: PostgresqlServer, pooler: int) -> None:
    assert keeps_records(postgresql.new_database_over_tcp(port=pooler))
