"""A PostgreSQL server of the tests' own, in a temporary folder: Debian's, as an ordinary user."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from eagle_eye.server.store.sql_store import SqlStore

Opens = Callable[[], SqlStore]
USER = "eagle_eye"
PASSWORD = "right: one"


@dataclass
class PostgresqlServer:
    """A running server, with a socket in its folder and a port on 127.0.0.1 that asks for a password."""

    bin: Path
    folder: Path
    port: int
    _names: Iterator[int] = field(default_factory=itertools.count)

    def execute(self, statement: str, database: str = "postgres") -> list[Any]:
        """Run a statement as the server's owner, and return its rows."""
        with closing(psycopg.connect(self.url(database).replace("+psycopg", ""), autocommit=True)) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description is not None else []

    def new_database(self, options: str = "") -> str:
        """Make an empty database and return its URL, over the socket."""
        name = f"records_{next(self._names)}"
        self.execute(f"CREATE DATABASE {name} {options}")
        return self.url(name)

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://{USER}@/{database}?host={self.folder}&port={self.port}"

    def new_database_over_tcp(self, parameters: str = "", port: int = 0) -> str:
        """Make an empty database and return its URL as other hosts reach it, or by a pooler on that port."""
        database = self.new_database().partition("@/")[2].partition("?")[0]
        place = f"{USER}@127.0.0.1:{port or self.port}"
        return f"postgresql+psycopg://{place}/{database}?connect_timeout=5{parameters}"

    def control(self, *words: str) -> None:
        """Run pg_ctl on the server's files."""
        files = ("-D", str(self.folder / "data"), "--log", str(self.folder / "log"))
        run_as_ordinary_user(str(self.bin / "pg_ctl"), *files, *words)


@contextmanager
def serving(bin_: Path, more: str = "") -> Iterator[PostgresqlServer]:
    """Run a server while the block runs; ``more`` are lines of its configuration."""
    folder = Path(tempfile.mkdtemp(prefix="eagle-eye-postgresql-"))
    server = PostgresqlServer(bin_, folder, free_port())
    try:
        (folder / "password").write_text(PASSWORD, encoding="utf-8")
        owned_by_ordinary_user(folder, folder / "password")
        folder.chmod(0o755)
        run_as_ordinary_user(
            *(str(bin_ / "initdb"), "-D", str(folder / "data"), "-U", USER, "--pwfile", str(folder / "password")),
            *("--auth-local=trust", "--auth-host=scram-sha-256", "--encoding=UTF8", "--no-sync"),
            # A locale that sorts otherwise than by bytes, as many databases have.
            *("--locale=C.UTF-8", "--locale-provider=icu", "--icu-locale=en-US"),
        )
        (folder / "data/postgresql.auto.conf").write_text(
            f"unix_socket_directories = '{folder}'\nlisten_addresses = '127.0.0.1'\nport = {server.port}\n"
            f"fsync = off\nmax_connections = 200\n{more}",
            encoding="utf-8",
        )
        server.control("start", "--wait")
        yield server
    finally:
        if (folder / "data/postmaster.pid").exists():
            server.control("stop", "--mode=immediate")
        shutil.rmtree(folder)


def owned_by_ordinary_user(*paths: Path) -> None:
    """Give files and folders to whom the database's programs run as."""
    if os.geteuid() == 0:
        for path in paths:
            shutil.chown(path, "nobody")


def run_as_ordinary_user(*command: str) -> None:
    """Run a program that refuses to run as root; its output counts where it fails."""
    before = ("runuser", "-u", "nobody", "--") if os.geteuid() == 0 else ()
    done = subprocess.run([*before, *command], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def replica_of(primary: PostgresqlServer) -> Iterator[PostgresqlServer]:
    """Run a streaming replica of the server while the block runs."""
    folder = Path(tempfile.mkdtemp(prefix="eagle-eye-postgresql-replica-"))
    replica = PostgresqlServer(primary.bin, folder, free_port())
    try:
        owned_by_ordinary_user(folder)
        folder.chmod(0o755)
        run_as_ordinary_user(
            *(str(primary.bin / "pg_basebackup"), "-D", str(folder / "data"), "--write-recovery-conf", "--no-sync"),
            *("--checkpoint=fast", "-h", str(primary.folder), "-p", str(primary.port), "-U", USER),
        )
        with (folder / "data/postgresql.auto.conf").open("a", encoding="utf-8") as settings:
            settings.write(f"unix_socket_directories = '{folder}'\nport = {replica.port}\n")
        replica.control("start", "--wait")
        yield replica
    finally:
        if (folder / "data/postmaster.pid").exists():
            replica.control("stop", "--mode=immediate")
        shutil.rmtree(folder)


@contextmanager
def as_replica(server: PostgresqlServer) -> Iterator[None]:
    """Have the server stay in recovery while the block runs, as a replica does that is never promoted."""
    signal = server.folder / "data/standby.signal"
    server.control("stop", "--wait", "--mode=fast")
    signal.touch()
    owned_by_ordinary_user(signal)
    server.control("start", "--wait")
    try:
        yield
    finally:
        server.control("stop", "--wait", "--mode=fast")
        signal.unlink()
        server.control("start", "--wait")
