"""A site that documented commands work on: a server with a fault in a replayed trace, and a folder for each page.

A command is typed as it stands, by a real shell, with a reader's substitutions alone: upper-case words, example hosts
and node names become those of this site, and the system's folders become folders below the site's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx

from tests.docs.commands import Line, simple_commands
from tests.docs.pages import ROOT
from tests.docs.parsing import PLACEHOLDERS, filled
from tests.loopback import free_port
from tests.server.test_flight_recorder import dump, entry, write

BIN = Path(sys.executable).parent
WITHIN_S = 60.0
DEFAULT_PORTS = (8470, 8471, 8472)  # of server, agent and orchestrator; somebody may use them on this machine
SETTLED_S = 0.2  # what has said its first line and is to fail, fails within it
# What only a production host has. Each stands in the PATH as a program that writes its words down and succeeds.
STAND_INS = {
    "systemctl": "needs systemd as the first process; tests/agent/test_service_manager.py runs the units",
    "systemd-tmpfiles": "writes to the host's own folders",
    "chown": "gives files to a user that only a production host has",
    "useradd": "changes the host's users",
    "logger": "writes to the host's log",
    "scontrol": "tests/orchestrators/slurm has a real one",
    "sacctmgr": "tests/orchestrators/slurm has a real one",
    "journalctl": "reads the host's log",
    "sudo": "runs the rest as whoever runs the tests: the users that it names are a production host's",
    "runuser": "as sudo",
}
# What may be typed: programs that change nothing but the files that they are given.
TYPED = {
    *("eagle-eye", "curl", "jq", "python3", "promtool", "amtool", "sha256sum", "export", "cd", "echo", "printf", "cat"),
    *(
        "cp",
        "mv",
        "mkdir",
        "install",
        "chmod",
        "grep",
        "head",
        "umask",
        "tail",
        "sort",
        "test",
        "date",
        "hostname",
        "true",
        "openssl",
    ),
}
# A server on loopback may ask for no token; this one does.
WITHOUT_TOKEN = {
    "curl": "-H 'Authorization: Bearer {TOKEN}'",
    "eagle-eye loadtest": "--join-token-file {root}/etc/eagle-eye/join-token",
}
AS_ANOTHER = 'while [ "$1" = -u ]; do shift 2; done; if [ "$1" = -- ]; then shift; fi; exec "$@"'
FOLDERS = (
    "/etc/eagle-eye",
    "/etc/tmpfiles.d",
    "/etc/systemd/system",
    "/var/lib",
    "/backup",
    "/dev/shm",
    "/shared",
    "/srv",
    "/run",
    "/tmp",
)
_FOLDER = re.compile(rf"(?<![\w.:/}}])({'|'.join(FOLDERS)})(?=/|\s|$|\"|')")
_OUTSIDE = re.compile(r"(?<![\w.:/}~)*$-])/(?!dev/null)[a-z][\w./-]*")
_HOSTS = r"SERVER|HOST|127\.0\.0\.1|localhost|10\.0\.0\.1|eagle-eye(?:\.example(?:\.com)?)?"
_URL = re.compile(rf"https?://(?:{_HOSTS})(?::8470)?(?![\w:.-])")
_ADDRESS = re.compile(r"\b(?:127\.0\.0\.1|localhost):8470\b")
_LISTEN = re.compile(r"(?<=--listen )\S+:\d+")
_NODES = re.compile(r"\b(?:node17|n3|node3|gpu0172)\b")
_TARGET = re.compile(r"https?://(?:[\w.-]+\.example(?:\.com)?|alertmanager|receiver)(?::\d+)?(?=[/\s'\"])")
_TIMES = re.compile(r"--since -\w+ --until -\w+")  # what this site has of its job is younger
_OWNER = re.compile(r" -[og] eagle-eye\b")  # a user of a production host
_BACKUP = re.compile(r"(?<=/backup/eagle-eye-)\d{4}-\d\d-\d\d")
_SERVES = re.compile(
    r"^(?:sudo )?(?:\S*/)?eagle-eye (server|agent|orchestrate|checkpoint store)\b"
    r"(?!.*--(?:once|print-config|help|show-config)\b)"
)


@dataclass
class Done:
    """What came of a command."""

    code: int
    said: str
    complained: str = ""


@dataclass
class Site:
    """A running server, what it found, and where its files are."""

    root: Path
    url: str
    values: dict[str, str] = field(default_factory=dict)
    newest: Callable[[str], str] = lambda _kind: "none"  # the id of the newest record of a kind

    def folder(self, page: str) -> Path:
        """Return the folder in which a page's reader works, with the files that its commands name."""
        folder = self.root / "pages" / page.replace("/", "-").removesuffix(".md")
        if not folder.exists():
            folder.mkdir(parents=True)
            self._furnish(folder)
        return folder

    def _furnish(self, folder: Path) -> None:
        etc = self.root / "etc/eagle-eye"
        for name in ("agent.toml", "server.toml", "token", "join-token", "admin-token", "operate-token"):
            shutil.copy(etc / name, folder / name)
        for name in ("packaging", "docs"):
            (folder / name).symlink_to(ROOT / name)
        for name in ("TRACE", "last-week"):
            shutil.copytree(self.root / "trace", folder / name)
        for name in ("FILE", "site-cases.toml"):
            shutil.copy(ROOT / "docs/reference/policy-cases.toml", folder / name)
        write(folder / "DUMPS", dump(entry(7), rank=0), dump(entry(7), rank=1), dump(entry(6), rank=2), form="json")
        shutil.copytree(folder / "DUMPS", folder / "FOLDER")
        tickets = "id,node,opened,closed,text\nINC-1,{node},2026-01-31T08:15:00Z,2026-02-02T10:00:00Z,GPU 3 replaced\n"
        (folder / "FILE.csv").write_text(tickets.format(node=self.values["NODE"]))
        (folder / "FILE.jsonl").write_text(
            json.dumps({"id": "INC-2", "node": self.values["NODE"], "opened": "2026-01-31T08:15:00Z"}) + "\n"
        )
        program = folder / "jobs.py"
        program.write_text("#!/bin/sh\nread asked; echo null\n")
        program.chmod(0o755)
        for name in ("flux_jobs.py", "ray_jobs.py", "program"):
            shutil.copy(program, folder / name)

    def typed(self, line: str) -> str:
        """Return the command as a reader of this site types it."""
        text = _URL.sub(self.url, line)
        text = _ADDRESS.sub(self.url.removeprefix("http://"), text)
        text = _LISTEN.sub(lambda _: f"127.0.0.1:{free_port()}", text)
        text = text.replace("/opt/eagle-eye/bin/", f"{BIN}/").replace(".venv/bin/", f"{BIN}/")
        text = _FOLDER.sub(lambda found: f"{self.root}{found[1]}", text)
        text = _NODES.sub(self.values["NODE"], text)
        text = _OWNER.sub("", text)
        text = _BACKUP.sub(datetime.now().astimezone().strftime("%Y-%m-%d"), text)
        for begins, given in WITHOUT_TOKEN.items():
            if text.startswith(begins) and not re.search("Authorization|token-file", text):
                text = text.replace(begins, f"{begins} {given.format(root=self.root, **self.values)}", 1)
        text = _TARGET.sub("http://127.0.0.1:9", text)
        text = _TIMES.sub(f"--since {self.values['TIME']}", text)
        for written, name in (("inc_…", "INCIDENT"), ("act_…", "ACTION"), ("ee_...", "TOKEN"), ("ee_…", "TOKEN")):
            text = text.replace(written, self.values[name])
        kept = {name: name for name in (*PLACEHOLDERS, "POST", "PUT", "PATCH", "DELETE", "GET", "FAULT")}
        kind = next((kind for kind in ("subscriptions", "silences") if kind.rstrip("s") in line), "deliveries")
        own = {**kept, **self.values, "ID": self.newest(kind)}
        return re.sub(r"(?<=\s)[^\s'\"]*[A-Z][^\s'\"]*", lambda found: filled(found[0], _Lenient(own)), text)

    def refusal(self, line: Line) -> str:
        """Return why a line is not typed here, "" where it is: its programs do what they do below the site's folder."""
        for words in simple_commands(line.text):
            program = words[0].rpartition("/")[2]
            if program not in TYPED and program not in STAND_INS and not words[0].startswith("./"):
                return (
                    f"{program} is run by no test; a line in tests/docs/elsewhere.py names one, or says why none does"
                )
        outside = _OUTSIDE.findall(self.typed(line.text).replace(str(self.root), "site").replace(f"{BIN}/", ""))
        if line.program not in ("eagle-eye", "export", *STAND_INS) and outside:
            return f"{outside[0]} is this machine's own; FOLDERS in tests/docs/site.py stand for a reader's"
        return ""

    def run(self, line: Line, exported: list[str]) -> Done:
        """Type the line in its page's folder, after the variables that were exported before it."""
        folder = self.folder(line.block.page)
        typed = self.typed(line.text)
        if made := re.search(r"tokens create .*--out (\S+)", typed):
            (folder / made[1]).unlink(missing_ok=True)  # the site has one already, which no reader has
        script = "\n".join([*exported, typed])
        environ = {
            "PATH": f"{self.root / 'stand-ins'}:{BIN}:{os.environ['PATH']}",
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "COLUMNS": "160",
            "EAGLE_EYE_SERVER": self.url,
            "EAGLE_EYE_TOKEN_FILE": str(self.root / "etc/eagle-eye/token"),
            "REPORT_TO": f"{self.url}/api/v1/actions/{self.values['ACTION']}/reports",
        }
        if "eagle-eye agent" in line.text:
            environ |= {
                "EAGLE_EYE_SPOOL_DIR": str(self.root / "spool"),
                "EAGLE_EYE_HOOK_SOCKET": str(self.root / "hook.sock"),
                "EAGLE_EYE_METRICS_LISTEN": f"127.0.0.1:{free_port()}",
            }
        if re.search(r"eagle-eye (server|orchestrate)\b", line.text):
            environ["EAGLE_EYE_LISTEN"] = f"127.0.0.1:{free_port()}"
        if "eagle-eye orchestrate" in line.text:
            environ["EAGLE_EYE_STATE_DIR"] = str(folder / "state")
        if _SERVES.match(line.text):
            return _served(script.replace(typed, f"exec {typed}"), folder, environ)
        done = subprocess.run(
            ["sh", "-c", script],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)


class _Lenient(dict[str, str]):
    """Upper-case words that are nobody's placeholder stay: they may be the shell's or a file's name."""

    def __contains__(self, _name: object) -> bool:
        return True

    def __missing__(self, name: str) -> str:
        return name


def _served(script: str, folder: Path, environ: dict[str, str]) -> Done:
    """Run what does not end by itself until it has said something, then ask it to stop: its exit code must be 0."""
    log = folder / "served.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["sh", "-c", script], cwd=folder, env=environ, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
        try:
            until_s = time.monotonic() + WITHIN_S
            while process.poll() is None and log.stat().st_size == 0 and time.monotonic() < until_s:
                time.sleep(0.02)
            if process.poll() is None:
                time.sleep(SETTLED_S)
            early = process.poll()
            process.send_signal(signal.SIGTERM)
            code = process.wait(WITHIN_S)
        finally:
            process.kill()
            process.wait()
    said = log.read_text()
    return Done(code if early is None else early or 1, said, "" if early is None else f"it ended by itself: {said}")


def _ours(*words: str) -> str:
    done = subprocess.run(
        [str(BIN / "eagle-eye"), *words], check=True, capture_output=True, text=True, timeout=WITHIN_S
    )
    return done.stdout.strip()


def _start(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([str(BIN / "eagle-eye"), *words], stdout=subprocess.DEVNULL)


def two(found: list[Any]) -> list[Any]:
    """Return them once there are two."""
    return found if len(found) == 2 else []


@contextmanager
def default_ports_taken() -> Iterator[None]:
    """Listen where nobody may: a command that is typed here with a default port fails on every machine."""
    with contextlib.ExitStack() as taken:
        for port in DEFAULT_PORTS:
            with contextlib.suppress(OSError):  # it is taken already
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
        yield


@contextmanager
def opened(root: Path) -> Iterator[Site]:
    """Run the site's server; a GPU of a simulated job is lost, and the server has found it."""
    data, etc = root / "data", root / "etc/eagle-eye"
    for folder in FOLDERS:
        (root / folder.strip("/")).mkdir(parents=True, exist_ok=True)
    _stand_ins(root / "stand-ins")
    tokens = {scope: _ours("tokens", "create", "--scope", scope, "--data", str(data)) for scope in ("admin", "join")}
    for name in ("token", "orchestrate.token", "eagle-eye-token", "admin-token", "operate-token", "join-token"):
        (etc / name).write_text(tokens["join" if name == "join-token" else "admin"])
    trace = root / "trace"
    _ours(
        "simulate", str(trace), "--fault", "gpu_lost", "--nodes", "3", "--gpus", "1", "--minutes", "1.5", "--seed", "1"
    )
    url = f"http://127.0.0.1:{free_port()}"
    own = root / "site.toml"
    own.write_text(
        f'listen = "{url.removeprefix("http://")}"\ndata_dir = "{data}"\n'
        '[webhooks]\nallow_private = true\n[policy]\nmode = "act"\n'
    )
    (etc / "server.toml").write_text(f'data_dir = "{data}"\n')
    (etc / "agent.toml").write_text(
        f'server = "{url}"\nnode = "gpu-7"\njoin_token_file = "{etc}/join-token"\n'
        f'spool_dir = "{root}/spool"\nhook_socket = "{root}/hook.sock"\nmetrics_listen = ""\n'
    )
    command = [str(BIN / "eagle-eye"), "server", "--config", str(own)]
    with (root / "server.log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            headers = {"Authorization": f"Bearer {tokens['admin']}"}
            with httpx.Client(base_url=url, trust_env=False, headers=headers, timeout=10.0) as client:
                eventually(lambda: _answers(client, process))
                known = ("--server", url, "--token-file", str(etc / "token"))
                _ours("subscriptions", "add", "http://127.0.0.1:9/", *known)
                replays = [
                    _start("replay", str(trace), "--speed", "60", *known, f"--suffix={job}") for job in ("-a", "-b")
                ]
                assert [replay.wait(WITHIN_S) for replay in replays] == [0, 0]

                def newest(kind: str) -> str:
                    items = client.get(f"/api/v1/{kind}").json()["items"]
                    return str(items[0]["id"]) if items else "none"

                site = Site(root, url, newest=newest)
                asked = eventually(lambda: two(client.get("/api/v1/actions").json()["items"]))
                incident = client.get(f"/api/v1/incidents/{asked[0]['incident_id']}").json()
                since = datetime.now(timezone.utc) - timedelta(minutes=5)
                site.values = {
                    **dict.fromkeys(("JOB", "J"), incident["job"]),
                    "NODE": incident["nodes"][0],
                    "N": "4",
                    "INCIDENT": incident["id"],
                    "ACTION": asked[1]["id"],  # of another incident: what a page does to one leaves the other as it is
                    "TOKEN": tokens["admin"],
                    "URL": url,
                    "S": "2",
                    "TIME": since.strftime("%Y-%m-%dT%H:%M:%SZ"),
                }
                _ours("backup", str(root / "var/lib/eagle-eye-server"), "--data", str(data))
                yield site
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(WITHIN_S)


def _answers(client: httpx.Client, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "the server ended: see server.log"
    try:
        return client.get("/healthz").is_success
    except httpx.TransportError:
        return False


def eventually(found: Any) -> Any:
    """Return the first true value of ``found()``. Raises AssertionError after WITHIN_S."""
    until_s = time.monotonic() + WITHIN_S
    while not (value := found()):
        assert time.monotonic() < until_s, f"nothing after {WITHIN_S} s"
        time.sleep(0.05)
    return value


def _stand_ins(folder: Path) -> None:
    folder.mkdir()
    for name in STAND_INS:
        program = folder / name
        does = AS_ANOTHER if name in ("sudo", "runuser") else "exit 0"
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" "{name} $*" >> {folder}/calls\n{does}\n')
        program.chmod(0o755)
