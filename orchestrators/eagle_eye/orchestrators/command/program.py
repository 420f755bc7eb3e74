"""Runs a program for a bounded time, with bounded output, in its own session and without a shell."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

OUTPUT_BYTES_MAX = 65_536
PIPE_BYTES_MAX = 1 << 20  # a pipe's capacity, with the system's usual limits
KILL_AFTER_S = 3.0
POLL_S = 0.05
_READ_BYTES = 65_536


@dataclass(frozen=True)
class ProgramResult:
    """The result of a run; ``exit_code`` is negative for a signal, as in subprocess. ``late``: it timed out.

    Of too much output the end is kept; ``cut``: ``out`` is truncated.
    """

    exit_code: int
    out: str
    err: str
    late: bool = False
    cut: bool = False


class Programs:
    """Runs programs, from any thread; ``close`` ends the running ones."""

    def __init__(self, environment: Mapping[str, str], folder: str) -> None:
        self._environment = dict(environment)
        self._folder = folder
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._closed = False

    def run(
        self,
        words: Sequence[str],
        given: bytes,
        within_s: float,
        extra: Mapping[str, str],
        out_bytes_max: int = OUTPUT_BYTES_MAX,
    ) -> ProgramResult:
        """Run a program; return its result. Raises OSError where it cannot be started, also after ``close``.

        Its background processes continue after a normal exit; on a timeout its whole session is killed.
        """
        with self._lock:
            if self._closed:
                raise OSError(0, "the orchestrator is ending")
            process = subprocess.Popen(
                list(words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**self._environment, **extra},
                cwd=self._folder,
                start_new_session=True,
            )
            self._running.add(process)
        try:
            with process:
                return _Attendance(process, given, out_bytes_max).until_its_end(time.monotonic() + within_s)
        finally:
            with self._lock:
                self._running.discard(process)

    def close(self) -> None:
        """End all running programs; no more are started."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for process in running:
            _signal(process, signal.SIGTERM)
        until_s = time.monotonic() + KILL_AFTER_S
        while any(process.poll() is None for process in running) and time.monotonic() < until_s:
            time.sleep(POLL_S)
        for process in running:
            _signal(process, signal.SIGKILL)


class _Attendance:
    """Feeds one process and reads its output, until it exits or is killed."""

    def __init__(self, process: subprocess.Popen[bytes], given: bytes, out_bytes_max: int) -> None:
        self._process = process
        self._unsent = memoryview(given)
        self._out = _Tail(out_bytes_max)
        self._err = _Tail(OUTPUT_BYTES_MAX)
        self._tails = {_descriptor(process.stdout): self._out, _descriptor(process.stderr): self._err}
        self._selector = selectors.DefaultSelector()
        for pipe in (process.stdin, process.stdout, process.stderr):
            descriptor = _descriptor(pipe)
            os.set_blocking(descriptor, False)
            self._selector.register(
                descriptor, selectors.EVENT_WRITE if pipe is process.stdin else selectors.EVENT_READ
            )

    def until_its_end(self, until_s: float) -> ProgramResult:
        """Return the result; from ``until_s`` (of the monotonic clock) on the process is terminated, then killed."""
        late, kill_s = False, float("inf")
        with self._selector:
            while self._process.poll() is None:
                self._exchange()
                now_s = time.monotonic()
                if not late and now_s >= until_s:
                    late, kill_s = True, now_s + KILL_AFTER_S
                    _signal(self._process, signal.SIGTERM)
                elif now_s >= kill_s:
                    _signal(self._process, signal.SIGKILL)
        if late:
            _signal(self._process, signal.SIGKILL)
        # The last output. Not until EOF: background processes may hold the pipes open forever.
        for descriptor in self._tails:
            for _ in range(PIPE_BYTES_MAX // _READ_BYTES + 1):
                self._receive(descriptor)
        return ProgramResult(self._process.returncode, self._out.text(), self._err.text(), late, self._out.cut)

    def _exchange(self) -> None:
        if not self._selector.get_map():  # it has closed all three, and continues
            time.sleep(POLL_S)
            return
        for key, _ in self._selector.select(POLL_S):
            done = self._send(key.fd) if key.events & selectors.EVENT_WRITE else not self._receive(key.fd)
            if done:
                self._selector.unregister(key.fd)
                if key.events & selectors.EVENT_WRITE and self._process.stdin is not None:
                    self._process.stdin.close()

    def _send(self, descriptor: int) -> bool:
        """Return whether everything was sent, or the process does not read it: its exit code decides."""
        with contextlib.suppress(BlockingIOError):
            try:
                self._unsent = self._unsent[os.write(descriptor, self._unsent[:_READ_BYTES]) :]
            except BrokenPipeError:
                self._unsent = self._unsent[:0]
        return not self._unsent

    def _receive(self, descriptor: int) -> bool:
        """Return whether there may be more output."""
        try:
            received = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return True
        self._tails[descriptor].add(received)
        return bool(received)


class _Tail:
    """The end of a stream, ``bytes_max`` long; ``cut``: earlier output was dropped."""

    def __init__(self, bytes_max: int) -> None:
        self.cut = False
        self._bytes_max = bytes_max
        self._kept = bytearray()

    def add(self, received: bytes) -> None:
        self._kept += received
        if len(self._kept) > self._bytes_max:
            self.cut = True
            del self._kept[: -self._bytes_max]

    def text(self) -> str:
        return self._kept.decode(errors="replace")


def _descriptor(pipe: IO[bytes] | None) -> int:
    assert pipe is not None  # noqa: S101 - all three are pipes
    return pipe.fileno()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
