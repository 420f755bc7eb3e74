"""Programs under measurement: started on one core, their CPU time and memory read from /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SUBJECT_CORE, GENERATOR_CORE = 0, 1
READY_S = 120.0
STOP_S = 300.0  # a program that is told to stop may first write down what it holds


class Look(NamedTuple):
    """A process and its children at one moment: Unix seconds, CPU seconds so far, resident bytes."""

    time_s: float
    cpu_s: float
    rss_bytes: int


def look(pid: int) -> Look:
    """Return the process with its children, those that have ended included."""
    cpu_s, rss_bytes = 0.0, 0
    for one in _tree(pid):
        with contextlib.suppress(OSError, IndexError, ValueError):
            # After the name, which may hold anything: utime, stime, cutime, cstime are 14 to 17 of them all, rss 24.
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            cpu_s += sum(int(ticks) for ticks in fields[11:15]) * TICK_S
            rss_bytes += int(fields[21]) * PAGE_BYTES
    return Look(time.time(), cpu_s, rss_bytes)


def _tree(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        for thread in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, thread.read_text().split())
    return found


class Course:
    """Looks at a process once a second until stopped."""

    def __init__(self, pid: int) -> None:
        self.looks: list[Look] = []
        self._pid = pid
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(1.0):
            self.looks.append(look(self._pid))

    def stop(self) -> list[Look]:
        """Return all looks."""
        self._stopping.set()
        self._thread.join()
        return self.looks


@contextlib.contextmanager
def program(command: Sequence[str], log: Path, ready_url: str, core: int = SUBJECT_CORE) -> Iterator[int]:
    """Run a program on one core; give its process id once it answers. At the end it is told to stop, and waited for."""
    with log.open("wb") as output:
        process = subprocess.Popen([*on_core(core), *command], stdout=output, stderr=output)
        try:
            _wait_until_ready(process, ready_url, log)
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise RuntimeError(f"{command} did not stop within {STOP_S:.0f} s; see {log}") from None


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + READY_S
    while process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1.0) as answer:
            if answer.status == 200:
                return
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.1)
    raise RuntimeError(f"{process.args!r} does not answer at {url}; see {log}:\n{log.read_text()[-2000:]}")


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


def on_core(core: int) -> list[str]:
    """Return what a command begins with so that it stays on one core."""
    return ["taskset", "--cpu-list", str(core)]


def bytes_in(*paths: Path) -> int:
    """Return how many bytes the files in the folders hold, and the files themselves."""
    total = 0
    for path in paths:
        for file in path.rglob("*") if path.is_dir() else [path]:
            with contextlib.suppress(FileNotFoundError):
                if file.is_file():
                    total += file.stat().st_size
    return total
