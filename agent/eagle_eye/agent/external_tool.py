"""Runs a host tool without a shell, with a timeout, bounded output and low CPU priority."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

NICENESS = 10
READ_BYTES = 1 << 16
COMPLAINT_BYTES_MAX = 2_048  # kept of its stderr
LOOK_EVERY_S = 0.005
REAP_S = 0.5  # how long a killed program may take to exit; one in an uninterruptible call is left behind


class ToolResult(NamedTuple):
    """The outcome. ``status`` None: it was killed at the deadline, or for too much output (``cut``)."""

    status: int | None
    output: bytes
    complaint: str
    cut: bool


def find(name: str) -> str | None:
    """Return the program's path, from PATH or beside our own Python; None where it is not installed."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def run(
    arguments: Sequence[str],
    until_s: float,
    output_bytes_max: int,
    folder: Path | None = None,
    monotonic_s: Callable[[], float] = time.monotonic,
) -> ToolResult:
    """Run a program until it exits or ``until_s``, by ``monotonic_s``; then kill it and its children.

    It gets only PATH of our environment, which may hold secrets. Raises OSError when it cannot start.
    """
    process: subprocess.Popen[bytes] | None = None
    output, complaint = bytearray(), bytearray()
    ended = False
    try:
        with _handlers_wait():
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},
                start_new_session=True,
            )
        with contextlib.suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, 0)  # a niced agent gets tools at least as nice, also as root
            os.setpriority(os.PRIO_PROCESS, process.pid, max(own, NICENESS))
        _read(process, (output, output_bytes_max), (complaint, COMPLAINT_BYTES_MAX), until_s, monotonic_s)
        ended = len(output) <= output_bytes_max and _ends(process.pid, until_s, monotonic_s)
    finally:
        if process is not None:
            _end(process)
    said = bytes(complaint[:COMPLAINT_BYTES_MAX]).decode("utf-8", "replace").strip()
    cut = len(output) > output_bytes_max
    return ToolResult(process.returncode if ended else None, bytes(output[:output_bytes_max]), said, cut)


@contextlib.contextmanager
def _handlers_wait() -> Iterator[None]:
    """Delay signal handlers until after the block: an exception from one would leave a starting program behind."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run only in the main thread
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    waiting = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in waiting:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in waiting.items():
            signal.signal(number, handler)
        for one in came:
            signal.raise_signal(one)


def _read(
    process: subprocess.Popen[bytes],
    output: tuple[bytearray, int],
    complaint: tuple[bytearray, int],
    until_s: float,
    monotonic_s: Callable[[], float],
) -> None:
    """Fill both until EOF, until the first exceeds its limit by one byte, or until time is up."""
    assert process.stdout is not None  # noqa: S101 - both are pipes
    assert process.stderr is not None  # noqa: S101
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, output)
        selector.register(process.stderr, selectors.EVENT_READ, complaint)
        while selector.get_map() and len(output[0]) <= output[1]:
            left_s = until_s - monotonic_s()
            if left_s <= 0:
                return
            for key, _ in selector.select(left_s):
                into, most = key.data
                data = os.read(key.fd, READ_BYTES)
                if not data:
                    selector.unregister(key.fileobj)
                into += data[: most + 1 - len(into)]


def _ends(pid: int, until_s: float, monotonic_s: Callable[[], float]) -> bool:
    """Whether the program exits in time. It is not reaped: its pid, which is killed next, must not be reused."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if monotonic_s() >= until_s:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the program and its children."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAP_S)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
