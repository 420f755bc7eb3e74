"""Shared by every child: bounded, without leftovers, and reporting progress line by line.

The modules of this folder need only the standard library and torch, so that any Python with torch can run them,
including a training environment's. A line is JSON: ``worker``, ``at_s`` (monotonic clock), and one of ``phase`` (what
it does from now on), ``values`` (its answer), ``finding`` (one wrong number) and ``error`` (``hardware``: whether the
host says that it is broken).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence

LOADING, OPENING, WORKING = "loading", "opening", "working"
SAY_EVERY_S = 0.2
FINDINGS_MAX = 8  # reported per worker
ERROR_CHARS_MAX = 300  # a line must fit into one write to a pipe, 4,096 bytes, or those of several workers mix
_GRACE_S = 5.0  # beyond the deadline, at which the parent kills; for when there is no parent any more
_PR_SET_PDEATHSIG = 1


class WorkerOutput:
    """One worker's output."""

    def __init__(self, worker: int, out: int) -> None:
        self._worker = worker
        self._out = out
        self._phase = ""
        self._due_s = 0.0
        self._findings = 0

    def phase(self, phase: str) -> None:
        """Report the current phase; repeated, it shows progress, at a limited rate."""
        now_s = time.monotonic()
        if phase != self._phase or now_s >= self._due_s:
            self._phase, self._due_s = phase, now_s + SAY_EVERY_S
            self._say(phase=phase)

    def values(self, values: Mapping[str, float]) -> None:
        """Report the answer."""
        self._say(values=dict(values))

    def finding(self, operation: str, index: Sequence[int], expected: float, got: float) -> None:
        """Report a wrong number, as text, since it may not be finite; only the first few."""
        self._findings += 1
        if self._findings <= FINDINGS_MAX:
            place = ",".join(map(str, index))
            self._say(finding={"operation": operation, "index": place, "expected": repr(expected), "got": repr(got)})

    def error(self, error: BaseException, *, hardware: bool) -> None:
        """Report why there is no answer."""
        text = f"{type(error).__name__}: {error}".split("\n", 1)[0]
        self._say(error=text[:ERROR_CHARS_MAX], hardware=hardware)

    def _say(self, **what: object) -> None:
        line = json.dumps({"worker": self._worker, "at_s": time.monotonic(), **what})
        os.write(self._out, line.encode("ascii") + b"\n")


def bounded(parent: int, until_s: float) -> None:
    """Make this process end with its parent, end after its deadline in any case, and dump no core."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(until_s - time.monotonic(), 0.0) + _GRACE_S)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it could be asked to take us along
        os._exit(1)


def private_output() -> int:
    """Return where lines go; everything else written to standard output goes to standard error from now on."""
    out = os.dup(1)
    os.dup2(2, 1)
    return out


def side_by_side(workers: int, until_s: float, work: Callable[[int, WorkerOutput], None]) -> None:
    """Run the work in so many processes at once; a hung one does not block the others. Returns when all have ended."""
    out, parent = private_output(), os.getpid()
    pids = []
    for worker in range(workers):
        pid = os.fork()
        if pid == 0:
            bounded(parent, until_s)
            line = WorkerOutput(worker, out)
            try:
                work(worker, line)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the parent process is told
                line.error(error, hardware=False)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
