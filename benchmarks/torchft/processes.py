"""The processes of the storm: lighthouse, replica groups that are started again, the subscriber, the server's part."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

Starts = ForkServerContext | SpawnContext

# A group that is gone leaves its cores to the others, whose steps must not become shorter by that: computing is filled
# up to the first, the whole step to the second.
COMPUTE_S = 0.12
STEP_S = 0.16
SAMPLES = 32  # of one group in a step


@dataclass(frozen=True)
class Replica:
    """What a replica group is started with."""

    group: str
    host: str
    lighthouse: str  # URL
    log: Path  # of its tries
    output: Path


class Try(NamedTuple):
    """A group's try at a step; ``groups`` are those whose samples the step holds."""

    at_s: float  # Unix time
    step: int
    groups: int
    committed: bool


@dataclass(frozen=True)
class Timing:
    """When a lighthouse takes a silent replica for dead, waits no longer for one that is not, and looks again."""

    heartbeat_s: float = 0.3
    join_s: float = 2.0
    tick_s: float = 0.02


TIMING = Timing()


def cold() -> Starts:
    """Return how a group is started by a new interpreter, which imports torch."""
    return multiprocessing.get_context("spawn")


def standby() -> Starts:
    """Return how a group is forked from a process that has imported torch and torchft, and waits."""
    context = multiprocessing.get_context("forkserver")
    # The latter is what an optimizer imports in its first step, for seconds, while all other groups wait for this one.
    context.set_forkserver_preload([f"{__package__}.train", "torch._dynamo"])
    return context


class Group:
    """A replica group that is started again whenever it ends, on the next host that is not excluded."""

    def __init__(
        self, name: str, hosts: list[str], folder: Path, lighthouse: str, starts: Starts | None = None
    ) -> None:
        """``starts``: cold or from a standby; cold by default."""
        self.name, self._hosts, self._folder, self._lighthouse = name, hosts, folder, lighthouse
        self._starts = starts or cold()
        self.log = folder / f"{name}.steps"
        self.host = ""
        self.started_s: list[float] = []  # Unix time of each start
        self._process: BaseProcess | None = None

    def keep(self, excluded: set[str], taken: set[str]) -> bool:
        """The group runs; returns whether it had to be started."""
        if self._process is not None and self._process.is_alive():
            return False
        from benchmarks.torchft.train import train  # who only computes figures needs no torchft

        self.host = next(host for host in self._hosts if host not in excluded | taken)
        self.started_s.append(time.time())
        replica = Replica(self.name, self.host, self._lighthouse, self.log, self._folder / f"{self.name}.log")
        self._process = self._starts.Process(target=train, args=(replica,), daemon=True)
        self._process.start()
        return True

    def end(self) -> None:
        """The group is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def tries(self) -> list[Try]:
        """Return every try of every process that was the group."""
        if not self.log.exists():
            return []
        lines = [line.split() for line in self.log.read_text(encoding="ascii").splitlines()]
        return [Try(float(at_s), int(step), int(groups), done == "1") for at_s, step, groups, done in lines]


class Reports:
    """The server's part: takes reports on actions."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, str, str, str]] = []  # Unix time, action, state, detail
        reports = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.path.endswith("/reports"):
                    said = json.loads(body)
                    action = self.path.split("/")[4]
                    reports.heard.append((time.time(), action, said["state"], said.get("detail", "")))
                self.send_response(200)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            do_GET = do_POST = do_PUT = _answer  # noqa: N815 - as the standard library wants it

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def ends(self) -> dict[str, tuple[float, str, str]]:
        """Return what was said last of each action that has come to an end: Unix time, state, detail."""
        return {
            action: (at_s, state, detail)
            for at_s, action, state, detail in list(self.heard)
            if state in ("done", "failed", "refused")
        }

    def close(self) -> None:
        """Nothing is taken any more."""
        self._server.shutdown()
        self._server.server_close()


def lighthouse(port: int, folder: Path, timing: Timing = TIMING) -> subprocess.Popen[bytes]:
    """Return a real lighthouse, which answers on the port."""
    program = (
        "import sys, threading; from torchft.coordination import LighthouseServer; "
        "join, tick, heartbeat = map(int, sys.argv[2:]); "
        "s = LighthouseServer(bind=sys.argv[1], min_replicas=1, join_timeout_ms=join, quorum_tick_ms=tick, "
        "heartbeat_timeout_ms=heartbeat); threading.Event().wait()"
    )
    times_ms = [str(round(time_s * 1000)) for time_s in (timing.join_s, timing.tick_s, timing.heartbeat_s)]
    with (folder / "lighthouse.log").open("ab") as log:
        words = [sys.executable, "-c", program, f"127.0.0.1:{port}", *times_ms]
        return subprocess.Popen(words, stdout=log, stderr=log)


def subscriber(port: int, server: str, lighthouse_url: str, folder: Path) -> subprocess.Popen[bytes]:
    """Return the subscriber as users start it."""
    words = [
        *("--job", "storm", "--lighthouse", lighthouse_url, "--server", server, "--listen", f"127.0.0.1:{port}"),
        *("--state-dir", str(folder / "state"), "--secret-file", str(folder / "secret"), "--poll", "1"),
    ]
    with (folder / "subscriber.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "eagle_eye.cli.main", "orchestrate", "torchft", *words], stdout=log, stderr=log
        )


def ended(process: subprocess.Popen[bytes]) -> None:
    """The process is gone."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10.0)
    process.kill()
    process.wait()
