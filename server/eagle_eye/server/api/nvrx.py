"""/api/v1/nvrx: the attribution endpoint of NVRx's ft_launcher (--ft-attribution-endpoint)."""

from __future__ import annotations

from typing import Annotated, Protocol

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response

from eagle_eye.schema.names import NAME_CHARS_MAX
from eagle_eye.server.api.nvrx_attribution import SubmittedLogs, attribute, body
from eagle_eye.server.api.requests import Body, answer, body_of, decoded, services
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.monitor.readiness import Doctor
from eagle_eye.server.security.auth import Credentials, Principal, Tokens
from eagle_eye.server.security.limits import Limits
from eagle_eye.server.store.store import INCIDENTS, Store

PATH_CHARS_MAX = 4_096
_SUBMITTED = {"log_path": {"minLength": 1, "maxLength": PATH_CHARS_MAX}, "job_id": {"maxLength": NAME_CHARS_MAX}}
INCIDENTS_MAX = 200
TERMINAL = "terminal"

router = APIRouter(prefix="/api/v1/nvrx", tags=["nvrx"])


class Needs(Protocol):
    """The server's components that this module uses."""

    clock: Clock
    doctor: Doctor
    limits: Limits
    store: Store
    tokens: Tokens


Parts = Annotated[Needs, Depends(services)]


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
