"""The processes: lighthouse, replica groups that are started again, the subscriber, the server's part in the storm."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import httpx

Starts = ForkServerContext | SpawnContext

# A group that is gone leaves its cores to the others, whose steps must not become shorter by that: computing is filled
# up to the first, the whole step to the second.
COMPUTE_S = 0.12
STEP_S = 0.16
SAMPLES = 32  # of one group in a step
ANSWERS_WITHIN_S = 60.0
KILLED = "got kill request"  # what torchft's manager says before it ends


@dataclass(frozen=True)
class Replica:
    """What a replica group is started with: its files are in ``folder``.

    ``hook``: the environment of Eagle Eye's hook, empty where there is none. ``resume_from``: a checkpoint, or None.
    """

    group: str
    host: str
    lighthouse: str  # URL
    folder: Path
    hook: Mapping[str, str]
    resume_from: Path | None

    @property
    def log(self) -> Path:
        """Return the file of its tries."""
        return self.folder / f"{self.group}.steps"

    @property
    def output(self) -> Path:
        """Return the file of what it prints."""
        return self.folder / f"{self.group}.log"

    @property
    def fault(self) -> Path:
        """Return the file that says what is wrong with the host; there is none where it is well."""
        return self.folder / f"{self.host}.fault"

    @property
    def checkpoints(self) -> Path:
        """Return the folder for checkpoints; where it does not exist, none are written."""
        return self.folder / "checkpoints"


class Try(NamedTuple):
    """A group's try at a step.

    ``groups`` are those whose samples the step holds. ``loss`` is that of the group's own samples, None where the step
    does not hold them: the group has just taken its state from another.
    """

    at_s: float  # Unix time
    step: int
    groups: int
    committed: bool
    loss: float | None = None


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
        self,
        name: str,
        hosts: list[str],
        folder: Path,
        lighthouse: str,
        starts: Starts | None = None,
        hook: Callable[[str], Mapping[str, str]] = lambda _: {},
    ) -> None:
        """``starts``: cold or from a standby; cold by default. ``hook``: its environment, by host."""
        self.name, self._hosts, self._folder, self._lighthouse = name, hosts, folder, lighthouse
        self._starts, self._hook = starts or cold(), hook
        self.host = ""
        self.resume_from: Path | None = None  # the checkpoint that it loads when it is started
        self.started_s: list[float] = []  # Unix time of each start
        self._process: BaseProcess | None = None

    def keep(self, excluded: set[str], taken: set[str]) -> bool:
        """The group runs; returns whether it had to be started. Raises SystemExit where no host is left for it."""
        if self._process is not None and self._process.is_alive():
            return False
        self.host = next((host for host in self._hosts if host not in excluded | taken), "")
        if not self.host:
            raise SystemExit(f"{self.name}: all {len(self._hosts)} hosts are excluded or taken")
        from benchmarks.torchft.train import train  # who only computes figures needs no torchft

        self.started_s.append(time.time())
        self._process = self._starts.Process(target=train, args=(self._replica(),), daemon=True)
        self._process.start()
        return True

    def end(self) -> None:
        """The group is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def tries(self) -> list[Try]:
        """Return every try of every process that was the group."""
        log = self._replica().log
        lines = log.read_text(encoding="ascii").split("\n")[:-1] if log.exists() else []  # the last is half written
        return [
            Try(float(at_s), int(step), int(groups), done == "1", None if loss == "-" else float(loss))
            for at_s, step, groups, done, loss in map(str.split, lines)
        ]

    def takes_part(self) -> bool:
        """Whether the group runs, and its process has committed the latest step that it tried."""
        alive = self._process is not None and self._process.is_alive()
        return alive and any(one.committed and one.at_s > self.started_s[-1] for one in self.tries()[-1:])

    def kills(self) -> int:
        """Return how many of the group's processes the lighthouse has told to end."""
        output = self._replica().output
        return output.read_text(encoding="utf-8", errors="replace").count(KILLED) if output.exists() else 0

    def _replica(self) -> Replica:
        return Replica(self.name, self.host, self._lighthouse, self._folder, self._hook(self.host), self.resume_from)


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


def lighthouse(port: int, folder: Path, timing: Timing = TIMING, address: str = "127.0.0.1") -> subprocess.Popen[bytes]:
    """Return a real lighthouse, which answers on the port of the address."""
    program = (
        "import sys, threading; from torchft.coordination import LighthouseServer; "
        "join, tick, heartbeat = map(int, sys.argv[2:]); "
        "s = LighthouseServer(bind=sys.argv[1], min_replicas=1, join_timeout_ms=join, quorum_tick_ms=tick, "
        "heartbeat_timeout_ms=heartbeat); threading.Event().wait()"
    )
    times_ms = [str(round(time_s * 1000)) for time_s in (timing.join_s, timing.tick_s, timing.heartbeat_s)]
    with (folder / "lighthouse.log").open("ab") as log:
        words = [sys.executable, "-c", program, f"{address}:{port}", *times_ms]
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


@contextmanager
def running_lighthouse(port: int, folder: Path, timing: Timing = TIMING) -> Iterator[str]:
    """A real lighthouse runs; yields its URL."""
    url = f"http://127.0.0.1:{port}"
    process = lighthouse(port, folder, timing)
    try:
        await_answer(f"{url}/status")
        yield url
    finally:
        ended(process)


def await_answer(url: str, within_s: float = ANSWERS_WITHIN_S) -> None:
    """The URL answers; raises SystemExit where it does not in time."""
    until_s = time.monotonic() + within_s
    while not _answers(url):
        if time.monotonic() > until_s:
            raise SystemExit(f"{url} did not answer within {within_s:g} s")
        time.sleep(0.1)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def ended(process: subprocess.Popen[bytes]) -> None:
    """The process is gone."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10.0)
    process.kill()
    process.wait()
