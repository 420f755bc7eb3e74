"""A PostgreSQL server for the demo's records: installed programs, a temporary folder, an ordinary user."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from eagle_eye.demo.stack import StageFailed, end_with_parent

PLACES = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin")  # of Debian's and of PostgreSQL's own packages
USER = "eagle_eye"
READY_WITHIN_S = 30.0
_IN_ROOTS_PLACE = "nobody"  # PostgreSQL refuses to run as root


def programs() -> Path | None:
    """Return the folder of the newest server programs, None where none are installed."""
    found = [path for place in PLACES for path in Path("/").glob(f"{place[1:]}/initdb")]
    if not found and (on_path := shutil.which("initdb")):
        return Path(on_path).resolve().parent
    return (
        max(found, key=lambda path: [int(part) for part in path.parts[-3:-2] if part.isdigit()]).parent
        if found
        else None
    )


def missing() -> str:
    """Return what has to be installed for records in PostgreSQL, and how; "" if nothing."""
    if programs() is None:
        return (
            "PostgreSQL's server programs are not installed (no initdb in "
            f"{', '.join(PLACES)} or on the PATH); on Debian: apt-get install postgresql-15"
        )
    if importlib.util.find_spec("psycopg") is None:
        return 'psycopg is not installed; pip install "eagle-eye[postgresql]"'
    return ""


class DemoPostgresql:
    """A server that runs until ``close``, reached by a socket that its own user alone can reach, and root.

    Raises StageFailed where it does not start.
    """

    def __init__(self, bin_: Path) -> None:
        self._bin = bin_
        self._folder = Path(tempfile.mkdtemp(prefix="eagle-eye-demo-postgresql-"))
        self.url = f"postgresql+psycopg://{USER}@/postgres?host={self._folder}"
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it and remove its files."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # waits for no client
            try:
                self._process.wait(READY_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGQUIT)
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        data, log = str(self._folder / "data"), self._folder / "log"
        how: dict[str, Any] = {"cwd": "/", "env": {"PATH": os.defpath, "LC_ALL": "C"}}
        if os.geteuid() == 0:
            owner = pwd.getpwnam(_IN_ROOTS_PLACE)
            os.chown(self._folder, owner.pw_uid, owner.pw_gid)
            how |= {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        with log.open("wb") as output:
            options = ("-D", data, "-U", USER, "--auth=trust", "--encoding=UTF8", "--no-sync")
            made = subprocess.run(
                [str(self._bin / "initdb"), *options], stdout=output, stderr=subprocess.STDOUT, check=False, **how
            )
            if made.returncode != 0:
                raise StageFailed(f"a database is made: initdb failed: {_last_line(log)}")
            settings = {"listen_addresses": "", "unix_socket_directories": str(self._folder), "fsync": "off"}
            words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
            self._process = subprocess.Popen(
                [str(self._bin / "postgres"), "-D", data, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509 - one prctl call, and no thread holds a lock yet
                **how,
            )
        deadline_s = time.monotonic() + READY_WITHIN_S
        while not self._ready(how):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise StageFailed(f"the database answers: {_last_line(log)}")
            time.sleep(0.05)

    def _ready(self, how: dict[str, Any]) -> bool:
        asked = [str(self._bin / "pg_isready"), "--quiet", "--host", str(self._folder)]
        return subprocess.run(asked, check=False, **how).returncode == 0


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1] if lines else "no word of why"
