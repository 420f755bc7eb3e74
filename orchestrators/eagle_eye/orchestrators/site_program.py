"""A site's program as an Orchestrator: one run per verb. ``eagle-eye orchestrate command -- PROGRAM [ARGS]``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from eagle_eye.orchestrators.command_line import seconds
from eagle_eye.orchestrators.ledger import write_whole
from eagle_eye.orchestrators.protocol import CannotCarryOutError, Cause, Exclusion, JobState, OrchestratorError, Restart
from eagle_eye.schema.action import JobUpdate, MemberRank

FORMAT = "eagle-eye-command/1"
LINE_CHARACTERS_MAX = 500
TEXT_CHARACTERS_MAX = 1_500
STATES = ("running", "completing", "cancelled", "preempted", "timeout", "maintenance", "failed", "finished")
_UNSEEN = re.compile(r"[^\x20-\x7e\u00a0-\uffff]+")


class StateAnswer(msgspec.Struct, frozen=True):
    """The answer to ``state``. ``state`` and ``ranks`` are for the server, where it has no better source."""

    attempt: int
    nodes: list[str]
    running: bool
    state: str = ""
    ranks: list[MemberRank] = []
    restart_owner: str = ""

    def known(self) -> JobState:
        """Return the job state that actions are checked against."""
        return JobState(self.attempt, frozenset(self.nodes), self.running)

    def update(self) -> JobUpdate | None:
        """Return the update for the server; None where the answer lacks the state of a job that is not running."""
        state = self.state or ("running" if self.running else "")
        return JobUpdate(self.attempt, state, self.ranks, self.restart_owner) if state else None


def state_request(job: str) -> dict[str, Any]:
    """Return the request for a job's state."""
    return {"format": FORMAT, "verb": "state", "job": job}


def exclude_request(request: Exclusion) -> dict[str, Any]:
    """Return the request to exclude nodes; ``now`` announces a restart that follows at once."""
    return {
        "format": FORMAT,
        "verb": "exclude",
        "job": request.job,
        "attempt": request.attempt,
        "nodes": list(request.nodes),
        "now": request.now,
        "cause": _cause(request.cause),
    }


def restart_request(job: str, request: Restart) -> dict[str, Any]:
    """Return the request to start a job's next attempt; ``distrust_since_s`` is a Unix time or null.

    ``resume_from`` is the value it must find in EAGLE_EYE_RESUME_FROM; "" where it may choose. ``restart_scope`` is the
    smallest restart that is safe.
    """
    return {
        "format": FORMAT,
        "verb": "restart",
        "job": job,
        "over_attempt": request.over_attempt,
        "without": list(request.without),
        "distrust_since_s": request.distrust_since_s,
        "resume_from": request.resume_from,
        "restart_scope": request.scope,
        "cause": _cause(request.cause),
    }


def readmit_request(nodes: Sequence[str]) -> dict[str, Any]:
    """Return the request to use nodes again."""
    return {"format": FORMAT, "verb": "readmit", "nodes": list(nodes)}


def stop_request(job: str, reason: str) -> dict[str, Any]:
    """Return the request to stop a job."""
    return {"format": FORMAT, "verb": "stop", "job": job, "reason": reason}


def parse_state(text: str) -> StateAnswer | None:
    """Return the answer, None for ``null``: the job is not this program's. Raises CannotCarryOutError."""
    try:
        answer = msgspec.json.decode(text, type=StateAnswer | None)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CannotCarryOutError(f"the program's answer to 'state' is not understood: {error}") from None
    if answer is not None and answer.state not in ("", *STATES):
        raise CannotCarryOutError(f"the program says state {answer.state[:40]!r}; expected one of {', '.join(STATES)}")
    return answer


def for_people(text: str) -> str:
    """Return the end of a program's output as one line."""
    lines = [_UNSEEN.sub(" ", line).strip()[:LINE_CHARACTERS_MAX] for line in text.splitlines()]
    return "; ".join(line for line in lines if line)[-TEXT_CHARACTERS_MAX:]


def _cause(cause: Cause) -> dict[str, str]:
    return {
        "incident_id": cause.incident_id,
        "action_id": cause.action_id,
        "fault": cause.fault,
        "summary": cause.summary,
        "repair": cause.repair,
    }


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


STATE_BYTES_MAX = 4 << 20  # of an answer; fits the server's limit for a job, 100,000 ranks


@dataclass(frozen=True)
class ProgramTimeouts:
    """Timeouts of the program, in seconds: for reporting a job's state, and for changing something."""

    state_s: float = 10.0
    verb_s: float = 300.0


class CommandOrchestrator:
    """Runs ``words``, a program and its arguments. The nodes it excluded are saved in ``file``.

    ``reported`` names the jobs whose state goes to the server. ``resumes``: the program may be called twice for one
    action.
    """

    name = "eagle-eye orchestrate command"

    def __init__(
        self,
        words: Sequence[str],
        programs: Programs,
        file: Path,
        limits: ProgramTimeouts | None = None,
        *,
        reported: Sequence[str] = (),
        resumes: bool = False,
    ) -> None:
        """Raise OrchestratorError where the file is not one of ours."""
        self.resumes = resumes
        self._words = tuple(words)
        self._programs = programs
        self._limits = limits or ProgramTimeouts()
        self._reported = tuple(reported)
        self._file = file
        self._lock = threading.Lock()
        self._excluded = _read(file)

    def state(self, job: str) -> JobState | None:
        """Return the job's state from the program; None where it says null, or for the job ""."""
        if not job:
            return None
        answer = self._ask(job)
        return None if answer is None else answer.known()

    def stop(self, job: str, reason: str) -> str:
        """Stop the job; returns once the program says that it has ended."""
        return self._do(stop_request(job, reason))

    def exclude(self, request: Exclusion) -> str:
        """Exclude the nodes, and save that; returns the program's answer."""
        # Saved first: a program that was killed half-way may have excluded them.
        self._remember(dict.fromkeys(request.nodes, request.cause.action_id))
        return self._do(exclude_request(request))

    def restart(self, job: str, request: Restart) -> str:
        """Start the job's next attempt; the program is not called where it already runs."""
        now = self.state(job)
        if now is not None and now.attempt > request.over_attempt and now.running:
            return f"attempt {now.attempt} runs already"
        return self._do(restart_request(job, request))

    def readmit(self, nodes: Sequence[str]) -> str:
        """Readmit those of the nodes that the program excluded."""
        ours = [node for node in nodes if node in self._excluded]
        if not ours:
            return f"{', '.join(nodes)}: not excluded from here, left alone"
        said = self._do(readmit_request(ours))
        self._forget(ours)
        return said

    def preview(self, request: Exclusion | Restart) -> str:
        """Return the request the program would get. It is not run: it might ignore a dry run flag."""
        program = " ".join(self._words)
        if isinstance(request, Exclusion):
            return f"run {program} to exclude {', '.join(request.nodes)}"
        return f"run {program} to restart the job, now at attempt {request.over_attempt}"

    def jobs(self) -> Mapping[str, JobUpdate]:
        """Return the states of the jobs reported to the server."""
        answers = {job: self._ask(job) for job in self._reported}
        updates = {job: answer.update() for job, answer in answers.items() if answer is not None}
        return {job: update for job, update in updates.items() if update is not None}

    def close(self) -> None:
        """End all running programs."""
        self._programs.close()

    def _ask(self, job: str) -> StateAnswer | None:
        ended = self._run(state_request(job), self._limits.state_s, STATE_BYTES_MAX)
        if ended.cut:
            raise CannotCarryOutError(f"the program's answer to 'state' has more than {STATE_BYTES_MAX} bytes")
        return parse_state(ended.out)

    def _do(self, request: dict[str, Any]) -> str:
        ended = self._run(request, self._limits.verb_s, OUTPUT_BYTES_MAX)
        return for_people(ended.out) or f"{request['verb']}: exit code 0"

    def _run(self, request: dict[str, Any], within_s: float, out_bytes_max: int) -> ProgramResult:
        verb = request["verb"]
        given = json.dumps(request).encode() + b"\n"
        try:
            ended = self._programs.run(self._words, given, within_s, {"EAGLE_EYE_VERB": verb}, out_bytes_max)
        except OSError as error:
            raise CannotCarryOutError(f"{self._words[0]} cannot be run: {error.strerror}") from None
        if ended.late:
            raise CannotCarryOutError(_with(f"{verb}: killed after {within_s:g} s", ended))
        if ended.exit_code:
            raise CannotCarryOutError(_with(f"{verb}: {_code(ended.exit_code)}", ended))
        return ended

    def _remember(self, nodes: Mapping[str, str]) -> None:
        with self._lock:
            self._excluded = {**self._excluded, **nodes}
            write_whole(self._file, msgspec.json.encode(self._excluded))

    def _forget(self, nodes: Sequence[str]) -> None:
        with self._lock:
            self._excluded = {node: by for node, by in self._excluded.items() if node not in nodes}
            write_whole(self._file, msgspec.json.encode(self._excluded))


def _read(file: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OrchestratorError(f"{file}: {error}; repair or remove it") from None


def _with(what: str, ended: ProgramResult) -> str:
    said = for_people(ended.err) or for_people(ended.out)
    return f"{what}: {said}" if said else what


def _code(exit_code: int) -> str:
    if exit_code > 0:
        return f"exit code {exit_code}"
    try:
        return f"ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"ended by signal {-exit_code}"


# The variables a program needs from the environment. Our own are excluded: they may contain tokens.
PASSED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    add = parser.add_argument
    add("--timeout", type=seconds, default=300.0, metavar="S", help="how long a verb may take (300)")
    add("--state-timeout", type=seconds, default=10.0, metavar="S", help="how long 'state' may take (10)")
    add("--env", action="append", default=[], metavar="KEY=VALUE", help="in the program's environment")
    add("--pass-env", action="append", default=[], metavar="NAME", help="passed on from this environment")
    add("--report-state", action="store_true", help="ask 'state' every --poll seconds for the jobs of --jobs, "
        "which must be names, and tell the server")  # fmt: skip
    add("--resumes", action="store_true", help="the program may be asked again for an action that was interrupted")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM [ARGS]", help="no shell is involved")


def build(options: argparse.Namespace) -> CommandOrchestrator:
    """Return the orchestrator. Raises OrchestratorError naming the option."""
    words = list(options.program or [])
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise OrchestratorError("the program is missing; expected -- PROGRAM [ARGS]")
    found = shutil.which(words[0])
    if found is None:
        raise OrchestratorError(f"program {words[0]!r} is not found or not executable; chmod +x, or give its path")
    globs = [job for job in options.jobs if any(mark in job for mark in "*?[")]
    if options.report_state and (globs or not options.jobs):
        raise OrchestratorError("--report-state: expected the jobs' names in --jobs, not patterns")
    programs = Programs(_environment(options), os.getcwd())  # noqa: PTH109 - a text, as subprocess wants it
    return CommandOrchestrator(
        (str(Path(found).absolute()), *words[1:]),
        programs,
        options.state_dir / "excluded.json",
        ProgramTimeouts(options.state_timeout, options.timeout),
        reported=options.jobs if options.report_state else (),
        resumes=options.resumes,
    )


def _environment(options: argparse.Namespace) -> dict[str, str]:
    environment = {name: os.environ[name] for name in (*PASSED, *options.pass_env) if name in os.environ}
    for assignment in options.env:
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise OrchestratorError(f"--env {assignment!r}: expected KEY=VALUE")
        environment[name] = value
    return environment
