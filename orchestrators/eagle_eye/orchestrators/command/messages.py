"""The messages a site's program reads on stdin and writes on stdout: ``eagle-eye-command/1``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from eagle_eye.orchestrators.errors import CannotCarryOutError
from eagle_eye.orchestrators.protocol import Cause, Exclusion, JobState, Restart
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
