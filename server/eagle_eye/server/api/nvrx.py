"""/api/v1/nvrx: the attribution endpoint of NVRx's ft_launcher (--ft-attribution-endpoint), about failed cycles.

NVRx's launcher names the cycle's log when it begins and again when it has failed, then polls until there is a verdict
(NVRx 0.7.0, shared_utils/health_check.py and attribution/orchestration/client_response.py). The log itself is never
read: it is on the cluster's storage, and the agents' observations are more informative.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response

from eagle_eye.schema.names import NAME_CHARS_MAX
from eagle_eye.server.api.requests import Body, answer, body_of, decoded, services
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.model.records import Incident
from eagle_eye.server.monitor.readiness import Doctor
from eagle_eye.server.security.auth import Credentials, Limits, Principal, Tokens
from eagle_eye.server.store.store import INCIDENTS, Store

# Our incidents in the terms of NVRx's attribution service. Pure, except for a lock.

LOGS_MAX = 2_048
VERDICT_WITHIN_S = 30.0  # after a failure: agents' frames, detectors and evidence take seconds
LEAD_S = 60.0  # an incident may begin before its cycle's log does
REPEAT_S = 3_600.0
REASON_CHARS_MAX = 500
MODULE = "eagle_eye"

Recommendation = Literal["STOP", "RESTART", "UNKNOWN"]


class Submitted(NamedTuple):
    """A submitted log: its job, since when its cycle runs, and when it failed (None: not known to have)."""

    job: str
    since_s: float
    failed_s: float | None = None


class Attribution(NamedTuple):
    """The answer about one cycle. ``final`` False: nothing found yet, with time left."""

    final: bool
    action: Recommendation
    reason: str
    incident_id: str = ""


class SubmittedLogs:
    """Maps logs to jobs; the oldest are forgotten beyond LOGS_MAX. From any thread."""

    def __init__(self) -> None:
        self._logs: dict[str, Submitted] = {}
        self._lock = threading.Lock()

    def submit(self, log_path: str, job: str, now_s: float, *, failed: bool) -> None:
        """Record the log; submitting it again changes only whether it has failed."""
        with self._lock:
            known = self._logs.pop(log_path, None) or Submitted(job, now_s)
            failed_s = known.failed_s if known.failed_s is not None or not failed else now_s
            self._logs[log_path] = Submitted(job or known.job, known.since_s, failed_s)
            if len(self._logs) > LOGS_MAX:
                del self._logs[next(iter(self._logs))]

    def get(self, log_path: str) -> Submitted | None:
        """Return what is known of the log, None if it was never submitted or is forgotten."""
        with self._lock:
            return self._logs.get(log_path)


def attribute(log: Submitted | None, incidents: Sequence[Incident], blind: str, now_s: float) -> Attribution:
    """Return the attribution of a cycle, from its job's incidents in any order.

    ``blind`` says why the server cannot detect faults, "" if it can. STOP is returned if the program itself failed in
    this cycle and in an earlier one within an hour: another restart would fail again. Without findings the result is
    UNKNOWN, never a reason to continue or to stop.
    """
    if log is None:
        return Attribution(True, "UNKNOWN", "this server has not received the log, or has dropped it")
    if not log.job:
        return Attribution(True, "UNKNOWN", "nobody said to which job the log belongs; put the job into the endpoint")
    known = [one for one in incidents if one.job == log.job and one.state != "false" and not one.merged_into]
    mine = [one for one in known if one.detected_s >= log.since_s - LEAD_S and one.action != "none"]
    if mine:
        return _of_incident(max(mine, key=_weight), known, log)
    if blind:
        return Attribution(True, "UNKNOWN", f"cannot tell: {blind}"[:REASON_CHARS_MAX])
    if log.failed_s is None or now_s < log.failed_s + VERDICT_WITHIN_S:
        return Attribution(False, "UNKNOWN", "nothing is found yet")
    return Attribution(True, "UNKNOWN", f"nothing was found within {VERDICT_WITHIN_S:g} s of the failure")


def body(log_path: str, attribution: Attribution) -> dict[str, Any]:
    """Return the attribution as GET /logs answers it."""
    return {
        "mode": "single",
        "log_file": log_path,
        "status": "completed" if attribution.final else "pending",
        "result": {
            "module": MODULE,
            "state": "complete" if attribution.final else "pending",
            "result": attribution.reason,
            "result_id": attribution.incident_id,
        },
        "recommendation": {"action": attribution.action, "reason": attribution.reason, "source": MODULE},
    }


def _of_incident(found: Incident, known: Sequence[Incident], log: Submitted) -> Attribution:
    nodes = ", ".join(found.nodes)
    blamed = f" on {nodes}" if nodes else ""
    before = [
        one for one in known if one.application and log.since_s - REPEAT_S <= one.detected_s < log.since_s - LEAD_S
    ]
    if found.application and before:
        text = (
            f"{found.fault}{blamed}: {found.summary}; the program itself has failed so before: a restart does not help"
        )
        return Attribution(True, "STOP", text[:REASON_CHARS_MAX], found.id)
    asked = f"; {found.action} is asked for" if found.action != "notify" else ""
    return Attribution(True, "RESTART", f"{found.fault}{blamed}: {found.summary}{asked}"[:REASON_CHARS_MAX], found.id)


def _weight(incident: Incident) -> tuple[bool, float, float]:
    """Sort key: causes that are acted on first, then the surest, then the newest."""
    return incident.action != "notify", incident.confidence, incident.detected_s


PATH_CHARS_MAX = 4_096
_SUBMITTED = {"log_path": {"minLength": 1, "maxLength": PATH_CHARS_MAX}, "job_id": {"maxLength": NAME_CHARS_MAX}}
INCIDENTS_MAX = 200
TERMINAL = "terminal"

# The endpoint.

router = APIRouter(prefix="/api/v1/nvrx", tags=["nvrx"])


class NvrxNeeds(Protocol):
    """The server's components that this module uses."""

    clock: Clock
    doctor: Doctor
    limits: Limits
    store: Store
    tokens: Tokens


Parts = Annotated[NvrxNeeds, Depends(services)]


class LogSubmission(msgspec.Struct, frozen=True):
    """A cycle's log. ``analysis_intent`` is ``progressive`` when it begins and ``terminal`` when it has failed."""

    log_path: str
    job_id: str | None = None
    analysis_intent: str | None = None


def install(api: FastAPI) -> None:
    """Initialize the endpoints' state, with no log known yet."""
    api.state.nvrx_logs = SubmittedLogs()
    api.include_router(router)


def asker(request: Request, parts: Parts) -> Principal:
    """Return the principal. NVRx can send no header of its own: the password in the endpoint's URL may be a token."""
    principal = parts.tokens.authenticate(
        Credentials.of(request.method, request.headers, request.scope["state"], or_basic=True)
    )
    parts.limits.check_token(principal)
    parts.tokens.authorise(principal, "read")
    return principal


Asker = Annotated[Principal, Depends(asker)]
LogPath = Annotated[str, Query(max_length=PATH_CHARS_MAX, description="The cycle's log, as it was named before.")]


@router.post("/logs", openapi_extra=body_of(LogSubmission, _SUBMITTED))
def submit_log(request: Request, parts: Parts, _: Asker, content: Body) -> Response:
    """Take note of a cycle's log, by Slurm's number of its job. The log itself is not read."""
    return _submit(request, parts, content, "")


@router.post("/{job:name}/logs", openapi_extra=body_of(LogSubmission, _SUBMITTED))
def submit_log_of(request: Request, parts: Parts, _: Asker, job: str, content: Body) -> Response:
    """Take note of a cycle's log of this job."""
    return _submit(request, parts, content, job)


@router.get("/logs")
def attribute_log(request: Request, parts: Parts, _: Asker, log_path: LogPath = "") -> Response:
    """What is known of the cycle with this log: status ``pending`` or ``completed``, and a recommendation."""
    return _attribute(request, parts, log_path)


@router.get("/{job:name}/logs")
def attribute_log_of(request: Request, parts: Parts, _: Asker, job: str, log_path: LogPath = "") -> Response:  # noqa: ARG001
    """What is known of the cycle with this log."""
    return _attribute(request, parts, log_path)


def _submit(request: Request, parts: Parts, content: bytes, job: str) -> Response:
    said = decoded(content, LogSubmission)
    if not said.log_path or len(said.log_path) > PATH_CHARS_MAX:
        raise Refusal(400, "body", f"log_path: expected 1 to {PATH_CHARS_MAX} characters, got {len(said.log_path)}")
    if len(said.job_id or "") > NAME_CHARS_MAX:
        raise Refusal(
            400, "body", f"job_id: expected at most {NAME_CHARS_MAX} characters, got {len(said.job_id or '')}"
        )
    if len(job) > NAME_CHARS_MAX:
        raise Refusal(404, "not_found", f"no job's name has {len(job)} characters; at most {NAME_CHARS_MAX}")
    failed = said.analysis_intent == TERMINAL
    _logs(request).submit(said.log_path, job or said.job_id or "", parts.clock.now_s(), failed=failed)
    return answer({"submitted": True, "normalized_path": said.log_path, "mode": "single"})


def _attribute(request: Request, parts: Parts, log_path: str) -> Response:
    log = _logs(request).get(log_path)
    found = parts.store.page(INCIDENTS, {"job": log.job}, limit=INCIDENTS_MAX).items if log and log.job else []
    readiness = parts.doctor.check()
    wrong = [f"{name}: {state}" for name, state in readiness.checks.items() if state != "ok"]
    return answer(body(log_path, attribute(log, found, "; ".join(wrong), parts.clock.now_s())))


def _logs(request: Request) -> SubmittedLogs:
    logs = request.app.state.nvrx_logs
    assert isinstance(logs, SubmittedLogs)  # noqa: S101 - set by install
    return logs
