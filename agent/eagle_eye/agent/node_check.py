"""Active checks that the server requests in its replies to frames: run one at a time in a child process, then reported.

It is also a collector that collects nothing: its state in every frame tells the server that it accepts requests.
Touches: threads, processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

from eagle_eye.agent import external_tool as tool
from eagle_eye.agent.collector import CollectFailed, Drops, Observed
from eagle_eye.agent.evidence.requests import ANSWER_KEY, NODE_CHECK, REQUESTS_MAX, Send
from eagle_eye.agent.foreign_files import content
from eagle_eye.agent.processes.process_registry import TrainingProcess

LINES_BYTES_MAX = 1 << 14
NUMBER_BYTES_MAX = 64
DEPTH_MAX = 32
_UNLIMITED_BYTES = 1 << 60  # version 1 writes a number of pages near the largest there is


def memory_limit_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the lowest limit of our cgroup and its ancestors; None: there is none, or it is unknown.

    ``memory.high`` counts: processes beyond it are throttled to a standstill.
    """
    try:
        text = content(str(proc / "self/cgroup"), LINES_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return None
    limits: list[int] = []
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":  # version 2
            for place in ("", "unified"):
                limits += _limits(cgroups / place, path, ("memory.max", "memory.high"))
        elif "memory" in controllers.split(","):
            limits += _limits(cgroups / "memory", path, ("memory.limit_in_bytes",))
    return min(limits, default=None)


def _limits(root: Path, path: str, names: tuple[str, ...]) -> list[int]:
    """Return the limits from the root down to ``path``; inside a container the root is its own cgroup."""
    found: list[int] = []
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")][:DEPTH_MAX]
    for depth in range(len(parts) + 1):
        for name in names:
            try:
                text = content(str(root.joinpath(*parts[:depth], name)), NUMBER_BYTES_MAX).strip()
            except OSError:
                continue
            if text.isdigit() and int(text) < _UNLIMITED_BYTES:
                found.append(int(text))
    return found


# Runs the active check as a child process: own session, timeout, bounded output; terminated if the agent dies.
#
# It gets none of the agent's secrets and is the kernel's preferred OOM victim. Touches: processes.
OUTPUT_BYTES_MAX = 192 << 10  # a report of 16 GPUs is 40 KiB; the server accepts 256 KiB
COMPLAINT_BYTES_MAX = 2_048
READ_BYTES = 1 << 16
LOOK_EVERY_S = 0.5  # how often to check whether it must end: the longest a starting job waits for this
ENDS_S = 10.0  # it cleans up its own children; after this it is killed

# Variables for finding libraries and for communication: what the checks' own children need.
_KEPT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_HOME")
_KEPT_PREFIXES = ("NCCL_", "UCX_", "GLOO_")

# This small program execs the command. PR_SET_PDEATHSIG (1): it ends with the thread that started it, and so with a
# killed agent. Only the standard library, by a Python that reads no site files.
_START = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
try:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")
except OSError:
    pass
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Ran(NamedTuple):
    """The outcome. ``status`` None: it was ended, and ``why`` says for what reason."""

    status: int | None
    output: bytes
    complaint: str
    why: str = ""


def run(
    command: Sequence[str],
    until_s: float,
    in_the_way: Callable[[], str],
    monotonic_s: Callable[[], float] = time.monotonic,
) -> Ran:
    """Run it until it exits, or ``until_s``, or ``in_the_way`` says why it must stop. Raises OSError.

    Must be called from a thread that lives as long as the agent.
    """
    kept = {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith(_KEPT_PREFIXES)}
    process = subprocess.Popen(
        (sys.executable, "-I", "-S", "-c", _START, str(os.getpid()), *command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path("/"),
        env={**kept, "LC_ALL": "C.UTF-8"},
        start_new_session=True,
    )
    output, complaint = bytearray(), bytearray()
    why = "the agent failed"
    try:
        why = _read(process, output, complaint, until_s, in_the_way, monotonic_s)
    finally:
        status = _end(process, why)
    said = bytes(complaint[:COMPLAINT_BYTES_MAX]).decode("utf-8", "replace").strip()
    return Ran(None if why else status, bytes(output[:OUTPUT_BYTES_MAX]), said, why)


def _read(
    process: subprocess.Popen[bytes],
    output: bytearray,
    complaint: bytearray,
    until_s: float,
    in_the_way: Callable[[], str],
    monotonic_s: Callable[[], float],
) -> str:
    """Read its output until it exits; return why it must be ended early, "" when not."""
    assert process.stdout is not None  # noqa: S101 - both are pipes
    assert process.stderr is not None  # noqa: S101
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, (output, OUTPUT_BYTES_MAX))
        selector.register(process.stderr, selectors.EVENT_READ, (complaint, COMPLAINT_BYTES_MAX))
        while selector.get_map():
            if why := in_the_way():
                return why
            left_s = until_s - monotonic_s()
            if left_s <= 0:
                return "it did not end in time"
            for key, _ in selector.select(min(left_s, LOOK_EVERY_S)):
                into, most = key.data
                data = os.read(key.fd, READ_BYTES)
                if not data:
                    selector.unregister(key.fileobj)
                into += data[: most + 1 - len(into)]
            if len(output) > OUTPUT_BYTES_MAX:
                return f"it said more than {OUTPUT_BYTES_MAX} bytes"
    try:
        process.wait(max(0.0, min(until_s - monotonic_s(), ENDS_S)))
    except subprocess.TimeoutExpired:
        return "it closed its output and did not end"
    return ""


def _end(process: subprocess.Popen[bytes], why: str) -> int | None:
    """Let it clean up, then kill what is left of it; return its status, None if it cannot be reaped."""
    if why:
        with contextlib.suppress(OSError):
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_S)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    status = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        status = process.wait(1.0)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    return status


PATH = "/api/v1/node-checks"
CONTENT_TYPE = "application/json"
WAITING_MAX = 2
REMEMBERED_MAX = 64
CHECKS_MAX = 16
DEADLINE_S_MIN, DEADLINE_S_MAX = 5.0, 900.0
GRACE_S = 15.0  # beyond the check's own deadline, which it should keep by itself
BEGIN_S = 10.0  # to get the server's permission to start
REPORT_S = 60.0
CLOSE_S = 3.0
MEMORY_BYTES_MIN = 4 << 30  # torch with a context on each of eight GPUs needs about this much
OFF = "node_check_command is not set in the agent's configuration"

Run = Callable[[Sequence[str], float, Callable[[], str]], Ran]

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME = re.compile(r"[a-z0-9_]{1,40}")
_log = logging.getLogger("eagle_eye.agent")


class _Request(msgspec.Struct, frozen=True):
    """A request as in the server's answer; unknown keys are ignored. ``checks`` empty: all; a time of 0: default."""

    id: str
    kind: str
    deadline_s: float
    checks: list[str] = []
    gemm_s: float = 0.0
    sdc_s: float = 0.0


class NodeCheckResponder:
    """Serves requests, each once. No thread starts until the first request."""

    name = NODE_CHECK

    def __init__(
        self,
        command: Sequence[str],
        processes: Callable[[], Iterable[TrainingProcess]],
        send: Send,
        drops: Drops,
        run: Run = run,
        memory_bytes: Callable[[], int | None] = memory_limit_bytes,
    ) -> None:
        """``command`` runs the check, without its flags; empty: no checks, and the server is told so."""
        self._command = tuple(command)
        self._processes = processes
        self._send = send
        self._drops = drops
        self._run_child = run
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._seen: dict[str, None] = {}  # in order of arrival
        self._stop = threading.Event()
        self._waiting: queue.Queue[_Request | None] | None = None
        self._thread: threading.Thread | None = None

    def answered(self, answer: Mapping[str, object]) -> None:
        """Accept the requests in the server's answer to frames. Returns at once, never raises; thread-safe."""
        asked = answer.get(ANSWER_KEY)
        if not isinstance(asked, list):
            return
        for item in asked[:REQUESTS_MAX]:
            if not isinstance(item, dict) or item.get("kind") != NODE_CHECK:
                continue
            try:
                request = msgspec.convert(item, _Request)
            except msgspec.ValidationError:
                self._drops.count("node_check_malformed")
                continue
            with self._lock:
                if request.id not in self._seen:
                    self._take(request)

    def collect(self, now_s: float) -> Observed:  # noqa: ARG002 - there is nothing to collect
        """Return nothing. Raises CollectFailed while no check can run."""
        if why := self._unable():
            raise CollectFailed(why)
        return Observed()

    def close(self) -> None:
        """Accept no more and end the running check; the server is informed, if it answers soon."""
        self._stop.set()
        with self._lock:
            waiting, thread = self._waiting, self._thread
        if waiting is not None and thread is not None:
            with contextlib.suppress(queue.Full):  # a full queue wakes up anyway, and checks ``_stop``
                waiting.put_nowait(None)
            thread.join(CLOSE_S)

    def _take(self, request: _Request) -> None:
        understood = _ID.fullmatch(request.id) and all(map(_NAME.fullmatch, request.checks))
        if not understood or len(request.checks) > CHECKS_MAX or self._stop.is_set():
            self._drops.count("node_check_not_understood")
            return
        if self._waiting is None:
            self._waiting = queue.Queue(WAITING_MAX)
            thread = threading.Thread(target=self._serve_all, args=(self._waiting,), name="node-check", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the host's limit on threads; the server asks again
                self._waiting = None
                self._drops.count("node_check_failed")
                return
            self._thread = thread
        try:
            self._waiting.put_nowait(request)
        except queue.Full:
            self._drops.count("node_check_too_many")
            return
        self._seen[request.id] = None
        if len(self._seen) > REMEMBERED_MAX:
            del self._seen[next(iter(self._seen))]

    def _serve_all(self, waiting: queue.Queue[_Request | None]) -> None:
        while True:
            request = waiting.get()
            if request is None or self._stop.is_set():
                return
            try:
                self._serve(request)
            except Exception:  # noqa: BLE001 - the next request is to find somebody here
                self._drops.count("node_check_failed")
                _log.exception("node check %s failed because of a bug in the agent", request.id)

    def _serve(self, request: _Request) -> None:
        if why := self._unable() or self._in_the_way():
            self._refuse(request, why)
            return
        begun = {"state": "begun", "run": secrets.token_hex(16)}
        if problem := self._tell(request, begun, BEGIN_S):
            self._drops.count("node_check_not_begun")
            _log.warning("node check %s is not made: %s", request.id, problem)
            return
        deadline_s = DEADLINE_S_MIN
        if request.deadline_s > DEADLINE_S_MIN:  # False for NaN
            deadline_s = min(request.deadline_s, DEADLINE_S_MAX)
        _log.info("node check %s begins: %s", request.id, ", ".join(request.checks) or "everything")
        try:
            ran = self._run_child(
                self._line(request, deadline_s), time.monotonic() + deadline_s + GRACE_S, self._in_the_way
            )
        except OSError as error:
            self._refuse(request, f"{self._command[0]} cannot be started: {error.strerror or error}")
            return
        report = _report(ran.output) if not ran.why else None
        if report is None:
            self._refuse(request, ran.why or f"it ended with {ran.status} and without a report: {ran.complaint[-200:]}")
            return
        _log.info("node check %s: %s", request.id, report.get("verdict"))
        if report.get("refused") is True:
            self._refuse(request, str(report.get("reason", ""))[:300])
        elif problem := self._tell(request, {"state": "done", "report": report}, REPORT_S):
            self._drops.count("node_check_not_delivered")
            _log.warning("node check %s is lost: %s", request.id, problem)

    def _line(self, request: _Request, deadline_s: float) -> list[str]:
        program, *arguments = self._command
        line = [tool.find(program) or program, *arguments, "--json", "--deadline", f"{deadline_s:g}"]
        if request.checks:
            line += ["--only", *request.checks]
        if request.gemm_s > 0 and (not request.checks or "gemm" in request.checks):
            line += ["--gemm-seconds", f"{min(request.gemm_s, DEADLINE_S_MAX):g}"]
        if request.sdc_s > 0:
            line += ["--seconds", f"{min(request.sdc_s, DEADLINE_S_MAX):g}"]
        return line

    def _unable(self) -> str:
        """Return why this agent runs no checks at all, "" where it does."""
        if not self._command:
            return OFF
        limit_bytes = self._memory_bytes()
        if limit_bytes is not None and limit_bytes < MEMORY_BYTES_MIN:
            return (
                f"the agent's control group allows {limit_bytes >> 20} MiB of memory, a check needs"
                f" {MEMORY_BYTES_MIN >> 20} (docs/explanation/probation.md)"
            )
        return ""

    def _in_the_way(self) -> str:
        """Return why no check may run now, "" when one may."""
        if self._stop.is_set():
            return "the agent stops"
        training = next(iter(self._processes()), None)
        if training is not None:
            return f"rank {training.rank} of job {training.job} trains here (pid {training.pid}); it is not disturbed"
        return ""

    def _refuse(self, request: _Request, why: str) -> None:
        self._drops.count("node_check_refused")
        _log.warning("node check %s: %s", request.id, why)
        if problem := self._tell(request, {"state": "refused", "detail": why}, REPORT_S):
            self._drops.count("node_check_not_delivered")
            _log.warning("node check %s: the server was not told: %s", request.id, problem)

    def _tell(self, request: _Request, word: Mapping[str, object], within_s: float) -> str:
        return self._send(request.id, msgspec.json.encode(word), CONTENT_TYPE, within_s, self._stop)


def _report(output: bytes) -> dict[str, object] | None:
    """Return the report, None for invalid output: the server judges its contents."""
    try:
        return msgspec.json.decode(output, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
