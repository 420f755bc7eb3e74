"""A site's program as an Orchestrator: one run per verb."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from eagle_eye.orchestrators.command.messages import (
    StateAnswer,
    exclude_request,
    for_people,
    parse_state,
    readmit_request,
    restart_request,
    state_request,
    stop_request,
)
from eagle_eye.orchestrators.command.program import OUTPUT_BYTES_MAX, ProgramResult, Programs
from eagle_eye.orchestrators.errors import CannotCarryOutError, OrchestratorError
from eagle_eye.orchestrators.protocol import Exclusion, JobState, Restart
from eagle_eye.orchestrators.whole_file import write_whole
from eagle_eye.schema.action import JobUpdate

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
