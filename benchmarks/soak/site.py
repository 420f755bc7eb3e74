"""The processes of a soak: a server in a folder of its own, a subscriber, and the way to the server's API."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.ingest.processes import free_port

READY_S = 300.0
STOP_S = 120.0
REQUEST_S = 10.0
AGAIN_S = 0.25

# Faults come far more often than on a site: the limits on what is done about them are out of the way, and no longer
# apart than a minute what the server keeps is as much as it will ever be.
CONFIG = """
series_max = 2000

[history]
segment_s = {segment_s}
retention_s = {retention_s}
minutes_retention_s = {minutes_s}
hours_retention_s = 7200.0
records_retention_s = {retention_s}

[detection]
window_s = {window_s}
start_deadline_s = 120.0

[policy]
mode = "act"
expires_s = 60.0
window_s = 600.0
exclusions_per_job = 1000
exclusions_fleet_ratio = 1.0
restarts_per_job = 1000
restarts_fleet = 1000
breaker_actions = 100000
lost_work_s = 10.0
restart_s = 10.0
queue_s = 1.0
repeat_window_s = 60.0
probation_s = 0.0
readmit_check = "off"
watch_s = 60.0
verdict_gone_s = 5.0
reopen_s = 30.0

[webhooks]
allow_private = true
backoff_base_s = 0.2
backoff_max_s = 2.0
attempts_max = 200

[limits]
address_connections = 100000
"""


async def until(claim: Callable[[], bool], patience_s: float) -> bool:
    """Wait until the claim is true; return False when it is not after so many seconds."""
    end_s = time.monotonic() + patience_s
    while not claim():
        if time.monotonic() > end_s:
            return False
        await asyncio.sleep(AGAIN_S)
    return True


class Process:
    """A program that is started again and again, its output in one file."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = list(command)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """Its process id; None while it does not run."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if self._process is not None and running else None

    def start(self) -> None:
        """It runs."""
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output, start_new_session=True)
        self.starts += 1

    def stop(self, number: int) -> int:
        """Send it a signal and wait for its end; return its exit status. Raises TimeoutExpired."""
        if self._process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        return self._process.wait(STOP_S)

    def kill(self) -> None:
        """It does not run."""
        self.stop(signal.SIGKILL)


class Site:
    """A server and a subscriber below ``folder``. Touches: processes, loopback ports, the folder."""

    def __init__(self, folder: Path, settings: dict[str, float]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.data = folder / "data"
        self.received = folder / "received.jsonl"
        self._port, self._hook_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        config = folder / "server.toml"
        config.write_text(CONFIG.format(**settings))
        self.admin = self._token("--scope", "admin")
        self.join = self._token("--scope", "join")
        words = ["--listen", f"127.0.0.1:{self._port}", "--data", str(self.data), "--config", str(config)]
        self.server = Process([*_EAGLE_EYE, "server", *words], folder / "server.log")
        self._secret = folder / "secret"
        listen = ["--port", str(self._hook_port), "--secret-file", str(self._secret), "--log", str(self.received)]
        self.subscriber = Process(
            [sys.executable, "-m", "benchmarks.soak.subscriber", *listen], folder / "subscriber.log"
        )
        self.subscription = ""
        self.serving = False
        self._client = httpx.AsyncClient(
            base_url=self.url, headers={"authorization": f"Bearer {self.admin}"}, timeout=REQUEST_S, trust_env=False
        )

    async def start(self) -> None:
        """Everything runs, and the subscriber is subscribed to all but heartbeats."""
        self.subscriber.start()
        await self.start_server()
        body = {"url": f"http://127.0.0.1:{self._hook_port}/events"}
        answer = await self.ask("POST", "/api/v1/subscriptions", body)
        self._secret.write_text(answer["secret"])
        self.subscription = answer["id"]

    async def start_server(self) -> float:
        """The server runs and is ready; return how long that took. Raises RuntimeError."""
        began_s = time.monotonic()
        self.server.start()
        while self.server.pid is not None and time.monotonic() - began_s < READY_S:
            with contextlib.suppress(httpx.HTTPError):
                if (await self._client.get("/healthz")).status_code == 200:
                    self.serving = True
                    return time.monotonic() - began_s
            await asyncio.sleep(AGAIN_S)
        log = (self.folder / "server.log").read_text()[-2000:]
        raise RuntimeError(f"the server is not ready after {time.monotonic() - began_s:.0f} s:\n{log}")

    async def stop_server(self, number: int) -> None:
        """The server has ended by a signal. Raises TimeoutExpired."""
        self.serving = False
        await asyncio.to_thread(self.server.stop, number)

    async def ask(
        self, method: str, path: str, body: Any = None, patience_s: float = READY_S, accepted: Sequence[int] = ()
    ) -> Any:
        """Return the answer to a request, asked again while the server is away or busy.

        None for an answer of one of the ``accepted`` statuses. Raises RuntimeError for any other refusal.
        """
        end_s = time.monotonic() + patience_s
        while True:
            why = ""
            try:
                answer = await self._client.request(method, path, json=body)
                if answer.is_success:
                    return answer.json()
                if answer.status_code in accepted:
                    return None
                why = f"{answer.status_code} {answer.text[:500]}"
                if answer.status_code not in (429, 502, 503):
                    raise RuntimeError(f"{method} {path}: {why}")
            except httpx.TransportError as error:
                why = type(error).__name__
            if time.monotonic() > end_s:
                raise RuntimeError(f"{method} {path}: not answered within {patience_s:.0f} s: {why}")
            await asyncio.sleep(AGAIN_S)

    async def timed(self, path: str) -> tuple[float, bytes] | None:
        """Return how long an answer took, in seconds, and its body; None when there was none."""
        began_s = time.perf_counter()
        try:
            answer = await self._client.get(path)
        except httpx.TransportError:
            return None
        return (time.perf_counter() - began_s, answer.content) if answer.is_success else None

    async def close(self) -> None:
        """Nothing runs any more."""
        await self._client.aclose()
        self.server.kill()
        self.subscriber.kill()

    def _token(self, *words: str) -> str:
        command = [*_EAGLE_EYE, "tokens", "create", *words, "--data", str(self.data), "--json"]
        done = subprocess.run(command, check=True, capture_output=True)
        text: str = msgspec.json.decode(done.stdout)["token"]
        return text


_EAGLE_EYE = [sys.executable, "-m", "eagle_eye.cli.main"]
