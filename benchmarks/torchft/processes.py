"""The processes of the storm: lighthouse, replica groups that are started again, the subscriber, the server's part."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Group:
    """A replica group that is started again whenever it ends, on the next host that is not excluded."""

    def __init__(self, name: str, hosts: list[str], folder: Path, lighthouse: str) -> None:
        self.name, self._hosts, self._folder = name, hosts, folder
        self._environment = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse}
        self.log = folder / f"{name}.steps"
        self.host = ""
        self.started_s = 0.0  # Unix time
        self._process: subprocess.Popen[bytes] | None = None

    def keep(self, excluded: set[str], taken: set[str]) -> bool:
        """The group runs; returns whether it had to be started."""
        if self._process is not None and self._process.poll() is None:
            return False
        self.host = next(host for host in self._hosts if host not in excluded | taken)
        self.started_s = time.time()
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.torchft.train", self.name, self.host, str(self.log)],
                env=self._environment,
                stdout=log,
                stderr=log,
            )
        return True

    def end(self) -> None:
        """The group is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def steps(self) -> list[tuple[float, int, int, bool]]:
        """Return (Unix time, step, participants, committed) of every try."""
        if not self.log.exists():
            return []
        lines = [line.split() for line in self.log.read_text(encoding="ascii").splitlines()]
        return [(float(at), int(step), int(groups), done == "1") for at, step, groups, done in lines]


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

    def close(self) -> None:
        """Nothing is taken any more."""
        self._server.shutdown()
        self._server.server_close()


def lighthouse(port: int, folder: Path) -> subprocess.Popen[bytes]:
    """Return a real lighthouse, which answers on the port."""
    program = (
        "import sys, threading; from torchft.coordination import LighthouseServer; "
        "s = LighthouseServer(bind=sys.argv[1], min_replicas=1, join_timeout_ms=2000); threading.Event().wait()"
    )
    with (folder / "lighthouse.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-c", program, f"127.0.0.1:{port}"], stdout=log, stderr=log)


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
