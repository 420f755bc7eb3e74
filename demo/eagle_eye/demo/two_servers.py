"""The demo with two servers on one PostgreSQL: one leads, and the other does once it is killed while a node hangs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import httpx

from eagle_eye.demo.faults import inject
from eagle_eye.demo.narration import CULPRIT, EXPECTED, DemoTimeline, follow, training
from eagle_eye.demo.stack import (
    SERVER_CONFIG,
    STARTED_WITHIN_S,
    DemoSite,
    Stack,
    StageFailed,
    end_with_parent,
    free_port,
)

PLACES = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin")  # of Debian's and of PostgreSQL's own packages
POSTGRESQL_USER = "eagle_eye"
READY_WITHIN_S = 30.0
_IN_ROOTS_PLACE = "nobody"  # PostgreSQL refuses to run as root


def postgresql_programs() -> Path | None:
    """Return the folder of the newest server programs, None where none are installed."""
    found = [path for place in PLACES for path in Path("/").glob(f"{place[1:]}/initdb")]
    if not found and (on_path := shutil.which("initdb")):
        return Path(on_path).resolve().parent
    return (
        max(found, key=lambda path: [int(part) for part in path.parts[-3:-2] if part.isdigit()]).parent
        if found
        else None
    )


def postgresql_missing() -> str:
    """Return what has to be installed for records in PostgreSQL, and how; "" if nothing."""
    if postgresql_programs() is None:
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
        self.url = f"postgresql+psycopg://{POSTGRESQL_USER}@/postgres?host={self._folder}"
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
            options = ("-D", data, "-U", POSTGRESQL_USER, "--auth=trust", "--encoding=UTF8", "--no-sync")
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


SERVERS = ("server-a", "server-b")


class TwoServers(Stack):
    """The demo's processes with two servers; agents and launcher have both. ``api`` asks the one that leads."""

    def __init__(
        self,
        site: DemoSite,
        folder: Path,
        waiting: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        bin_ = postgresql_programs()
        if bin_ is None:
            raise StageFailed(postgresql_missing())
        self._postgresql = DemoPostgresql(bin_)
        try:
            config = f'{SERVER_CONFIG}\n[records]\nurl = "{self._postgresql.url}"\n'
            super().__init__(site, folder, waiting=waiting, config=config)
        except BaseException:
            self._postgresql.close()
            raise
        second = f"http://{site.head_address}:{free_port(site.head_address)}"
        self.servers = (self.url, second)
        self.leader = SERVERS[0]

    def start_server(self) -> None:
        """Start both servers, the second once the first one leads."""
        for name in SERVERS:
            self.start_one(name)
            self.wait("the first server leads", lambda: self.leadership(self.leader)["leads"] or None, STARTED_WITHIN_S)

    def start_one(self, name: str) -> None:
        """Start a server and wait until it answers."""
        self._start_server(name, self._url_of(name))

    def kill_leader(self) -> str:
        """Kill the server that leads, ask the other one from now on and return its name."""
        self.kill(self.leader)
        self.leader = next(name for name in SERVERS if name != self.leader)
        self.url = self._url_of(self.leader)
        self.api.base_url = httpx.URL(f"{self.url}/api/v1")
        return self.leader

    def leadership(self, name: str) -> dict[str, Any]:
        """Return what a server says of who leads; raises httpx.HTTPError."""
        found: dict[str, Any] = httpx.get(f"{self._url_of(name)}/leadz", timeout=1.0).json()
        return found

    def close(self) -> None:
        """End every process, the database last."""
        with contextlib.closing(self._postgresql):
            super().close()

    def _url_of(self, name: str) -> str:
        return self.servers[SERVERS.index(name)]


TAKEOVER_FAULT = "hang"
LEADS_WITHIN_S = 30.0
(_EXPECTED,) = EXPECTED[TAKEOVER_FAULT]


def play_takeover(stack: TwoServers, timeline: DemoTimeline) -> str:
    """Play the story to its end and return its moral. Raises StageFailed naming the stage that failed."""
    first = stack.leader
    timeline.report_stage(
        "leads", f"{first}, with epoch {stack.leadership(first)['epoch']}; the other server stands by"
    )
    before = training(stack, timeline, 0)
    began_s, how = inject(TAKEOVER_FAULT, stack, CULPRIT)
    timeline.fault_s = began_s
    timeline.report_stage("fault", how, began_s, "yellow")
    second = stack.kill_leader()
    killed_s = time.time()
    timeline.report_stage(
        "killed", f"{first}, which leads, is killed (SIGKILL) before it can judge", killed_s, "yellow"
    )

    def leads() -> dict[str, Any] | None:
        said = stack.leadership(second)
        return said if said["leads"] else None

    said = stack.wait("the other server leads", leads, LEADS_WITHIN_S)
    led_s = time.time()
    timeline.measure("injection to the other server leads", led_s)
    text = f"{second} leads, {led_s - killed_s:.1f} s after {first} was killed, with epoch {said['epoch']}"
    timeline.report_stage("leads", text, led_s, "green")
    follow(stack, timeline, before["attempt"], _EXPECTED, before)
    _once(stack)
    stack.start_one(first)
    again = stack.leadership(first)
    if again["leads"] or again["epoch"] != said["epoch"]:
        raise StageFailed(f"the server that was killed stands by once it is started again: it says {again}")
    timeline.report_stage("standby", f"{first} is started again and stands by")
    return f"{first} was killed while {CULPRIT} hung; {second} named it, and the job goes on without it"


def _once(stack: TwoServers) -> None:
    """Raise StageFailed unless one action alone was asked for; agents see other jobs of this machine, too."""
    actions = stack.items("actions", job=stack.job)
    asked = [f"{action['kind']} in attempt {action['attempt']}" for action in actions]
    if len(asked) != 1:
        raise StageFailed(f"one action is asked for: there are {len(asked)}: {', '.join(asked)}")
