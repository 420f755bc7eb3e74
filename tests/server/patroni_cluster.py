"""Two PostgreSQL servers that Patroni keeps, with etcd, as sites run them: Debian's packages, in a temporary folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import psycopg

from tests.server.own_process import wait_until
from tests.server.postgresql_server import USER, free_port, owned_by_ordinary_user

TTL_S = 20  # Patroni allows no less: so long the other one waits for a primary that says nothing
NAMES = ("east", "west")


def missing() -> str:
    """Return what is not installed, "" if nothing."""
    names = [one for one in ("patroni", "patronictl", "etcd") if shutil.which(one) is None]
    return f"{', '.join(names)} not installed: apt-get install patroni etcd-server" if names else ""


@dataclass
class PatroniCluster:
    """The two servers; ``url`` finds whichever is the primary."""

    bin: Path
    folder: Path
    etcd_port: int = field(default_factory=free_port)
    ports: dict[str, int] = field(default_factory=lambda: {name: free_port() for name in NAMES})
    rest_ports: dict[str, int] = field(default_factory=lambda: {name: free_port() for name in NAMES})
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        hosts = ",".join("127.0.0.1" for _ in NAMES)
        ports = ",".join(str(self.ports[name]) for name in NAMES)
        # libpq's own parameters: the first that takes writes.
        more = "target_session_attrs=read-write&connect_timeout=2"
        return f"postgresql+psycopg://{USER}@/records?host={hosts}&port={ports}&{more}"

    @property
    def primary(self) -> str:
        """The server that is the primary by its own Patroni, "" if none is."""
        return next((name for name in NAMES if self._answers(name, "primary")), "")

    def kill_primary(self) -> str:
        """End the primary with its Patroni at once, as a host that dies does; return its name."""
        name = self.primary
        postmaster = int((self.folder / name / "data/postmaster.pid").read_text().split()[0])
        for pid in (self.processes[name].pid, postmaster):
            with suppress(psutil.NoSuchProcess):  # it was a child of the other, and is gone
                parent = psutil.Process(pid)
                for process in (*parent.children(recursive=True), parent):
                    process.kill()
        self.processes[name].wait()
        return name

    def switch_over(self) -> None:
        """Have Patroni make the other one the primary, as before an upgrade."""
        before = self.primary
        words = (
            "patronictl",
            "-c",
            str(self.folder / "east.yml"),
            "switchover",
            "--force",
            "--leader",
            before,
            "records",
        )
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        wait_until(lambda: self.primary not in ("", before))

    def execute(self, statement: str, database: str = "records") -> None:
        url = self.url.replace("+psycopg", "").replace("/records?", f"/{database}?")
        with closing(psycopg.connect(url, autocommit=True)) as connection:
            connection.execute(statement.encode())

    def start(self) -> None:
        """Start etcd, then the primary, then its replica, to which commits wait to be copied."""
        client, peer = f"http://127.0.0.1:{self.etcd_port}", f"http://127.0.0.1:{free_port()}"
        self._start(
            "etcd",
            *("etcd", "--data-dir", str(self.folder / "etcd"), "--listen-client-urls", client),
            *("--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}", "--unsafe-no-fsync"),
        )
        wait_until(lambda: _status(f"{client}/health") == 200)
        for name in NAMES:
            file = self.folder / f"{name}.yml"
            file.write_bytes(msgspec.json.encode(self._settings(name)))  # JSON is YAML, too
            self._start(name, "patroni", str(file))
            wait_until(lambda name=name: self._answers(name, "health"))  # type: ignore[misc]
        wait_until(lambda: bool(self.primary))
        wait_until(lambda: any(self._answers(name, "synchronous") for name in NAMES))

    def close(self) -> None:
        for process in reversed(self.processes.values()):
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            process.wait()

    def _answers(self, name: str, path: str) -> bool:
        return _status(f"http://127.0.0.1:{self.rest_ports[name]}/{path}") == 200

    def _start(self, name: str, *command: str) -> None:
        before: Sequence[str] = ("runuser", "-u", "nobody", "--") if os.geteuid() == 0 else ()
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen([*before, *command], stdout=log, stderr=log, cwd="/")

    def _settings(self, name: str) -> dict[str, Any]:
        who = {"username": USER, "password": "any"}  # nobody is asked for one
        return {
            "scope": "records",
            "name": name,
            "restapi": {"listen": f"127.0.0.1:{self.rest_ports[name]}"},
            "etcd3": {"hosts": f"127.0.0.1:{self.etcd_port}"},
            "bootstrap": {
                "dcs": {"ttl": TTL_S, "loop_wait": 1, "retry_timeout": 3, "synchronous_mode": True},
                "initdb": [{"encoding": "UTF8"}, "no-sync"],
            },
            "postgresql": {
                "listen": f"127.0.0.1:{self.ports[name]}",
                "data_dir": str(self.folder / name / "data"),
                "bin_dir": str(self.bin),
                "pgpass": str(self.folder / name / "pgpass"),
                "authentication": {"superuser": who, "replication": who},
                "parameters": {"unix_socket_directories": str(self.folder / name), "fsync": "off"},
                "pg_hba": [
                    "host all all 127.0.0.1/32 trust",
                    "host replication all 127.0.0.1/32 trust",
                ],
            },
        }


def _status(url: str) -> int:
    try:
        return httpx.get(url, trust_env=False).status_code
    except httpx.TransportError:
        return 0


@contextmanager
def patroni(bin_: Path) -> Iterator[PatroniCluster]:
    """Run the cluster, with an empty database, while the block runs."""
    folder = Path(tempfile.mkdtemp(prefix="eagle-eye-patroni-"))
    cluster = PatroniCluster(bin_, folder)
    try:
        for name in NAMES:
            (folder / name).mkdir()
        owned_by_ordinary_user(folder, *(folder / name for name in NAMES))
        folder.chmod(0o755)
        cluster.start()
        cluster.execute("CREATE DATABASE records", "postgres")
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder)
