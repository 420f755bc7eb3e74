"""/api/v1/evidence: evidence that agents gathered before a job was stopped; upload and download."""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Annotated, Protocol

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import FileResponse
from starlette.requests import ClientDisconnect

from eagle_eye.server.api import views
from eagle_eye.server.api.requests import (
    NAME,
    Body,
    Cursor,
    Limit,
    OpenStreams,
    Operator,
    Reader,
    Seen,
    Somebody,
    answer,
    audited,
    body_of,
    decoded,
    found,
    given,
    list_of,
    listing,
    missing,
    read_body,
    services,
)
from eagle_eye.server.api.visibility import refused
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.engine.respond import LATE_S
from eagle_eye.server.engine.settings import EvidenceSettings
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.model.records import EvidenceKind, EvidenceRequest, EvidenceState, Incident
from eagle_eye.server.requests.evidence import OPEN_STATES, EvidenceRequests, Incoming, NotGzip
from eagle_eye.server.security.auth import Principal, Tokens
from eagle_eye.server.store.store import EVIDENCE, INCIDENTS, JOBS, NODES, PAGE_LIMIT_MAX, Change, Store
from eagle_eye.server.telemetry.counters import Telemetry

BUNDLE_TYPE = "application/gzip"
FAILURE_TYPE = "application/json"
UPLOADS_MAX = 8  # concurrent: a whole rack's bundles wait here rather than for the disk
WRITE_BYTES = 1 << 20  # gathered before a thread writes them
BUG_REPORT_S = 600.0  # the vendor's tool takes minutes
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")

_ASKING = {"nodes": list_of(NAME, EvidenceSettings().nodes_max)}

router = APIRouter(prefix="/api/v1", tags=["evidence"])


class EvidenceNeeds(Protocol):
    """The server's components that this module uses."""

    clock: Clock
    config: ServerConfig
    evidence_requests: EvidenceRequests
    fleet: Fleet
    open_uploads: OpenStreams
    store: Store
    telemetry: Telemetry
    tokens: Tokens


Parts = Annotated[EvidenceNeeds, Depends(services)]


class Asking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``nodes`` empty: the incident's, else its job's. ``bug_report``: also the GPU vendor's, as one more bundle."""

    nodes: list[str] = []
    bug_report: bool = False


class _Failure(msgspec.Struct, frozen=True):
    failed: str


@router.get("/evidence")
def list_evidence(
    parts: Parts,
    _: Reader,
    incident: str | None = None,
    job: str | None = None,
    node: str | None = None,
    state: EvidenceState | None = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    """Requests for evidence and what became of them, newest first."""
    filters = given(incident_id=incident, job=job, node=node, state=state)
    return listing(parts.store.page(EVIDENCE, filters, cursor, limit), views.evidence)


@router.get("/evidence/{evidence}")
def get_evidence(parts: Parts, _: Reader, evidence: str) -> Response:
    """One of them."""
    return answer(views.evidence(found(parts, EVIDENCE, evidence)))


@router.get("/evidence/{evidence}/bundle")
def download(parts: Parts, principal: Reader, sight: Seen, evidence: str) -> Response:
    """The bundle, a gzipped tar, as the agent made it.

    403 for NVIDIA's report, where people see their own jobs alone: it is of the whole host.
    """
    record = found(parts, EVIDENCE, evidence)
    if sight is not None and record.kind == "bug_report":
        why = "NVIDIA's report has the processes of the whole host"
        raise refused(principal, why, parts.config.sign_in.operate_groups)
    path = parts.evidence_requests.bundles.path(record.id)
    if record.state != "received" or not path.is_file():
        raise Refusal(
            404, "no_bundle", f"evidence {record.id} is {record.state}: {record.detail or 'no bundle is here'}"
        )
    name = f"evidence-{_UNSAFE.sub('_', record.node)[:80]}-{record.id}.tar.gz"
    return FileResponse(path, media_type=BUNDLE_TYPE, filename=name, headers={"Cache-Control": "no-store"})


@router.post("/incidents/{incident}/evidence", status_code=202, openapi_extra=body_of(Asking, _ASKING, required=False))
async def ask(parts: Parts, principal: Operator, incident: str, body: Body) -> Response:
    """Ask agents to gather evidence now. Who was asked already and has not answered is not asked twice."""
    asking = decoded(body, Asking)
    kinds: tuple[EvidenceKind, ...] = ("evidence", "bug_report") if asking.bug_report else ("evidence",)

    def change(store: Store) -> Change:
        record = store.get(INCIDENTS, incident)
        if record is None:
            raise missing("incidents", incident)
        nodes = asking.nodes or _nodes(parts, record)
        _check(parts, nodes)
        waiting = {(e.node, e.kind) for e in _asked_for(store, incident) if e.state == "asked"}
        new = tuple(
            _request(parts, principal, record, node, kind)
            for node in dict.fromkeys(nodes)
            for kind in kinds
            if (node, kind) not in waiting
        )
        entry = audited(parts, principal, "evidence", incident, f"{', '.join(kinds)} of {', '.join(nodes)}")
        return Change(evidence=new, audit=(entry,) if new else ())

    await asyncio.to_thread(parts.store.update, change)
    items = await asyncio.to_thread(_asked_for, parts.store, incident)
    return answer({"items": [views.evidence(item) for item in items]}, 202)


@router.put("/evidence/{evidence}")
async def upload(request: Request, parts: Parts, principal: Somebody, evidence: str) -> Response:
    """An agent's answer for its own node: a bundle (``application/gzip``), or JSON ``{"failed": why}``.

    What was answered before is answered as it is, and not read again.
    """
    record = await asyncio.to_thread(found, parts, EVIDENCE, evidence)
    parts.tokens.authorise_frames(principal, record.node)
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in (BUNDLE_TYPE, FAILURE_TYPE):
        raise Refusal(415, "content_type", f"content type {content_type[:80]!r} is not supported; send {BUNDLE_TYPE}")
    said = decoded(await read_body(request), _Failure) if content_type == FAILURE_TYPE else None
    if record.state not in OPEN_STATES:
        return answer(views.evidence(record))
    if said is None:
        record = await _take(parts, request, record)
    else:
        record = await asyncio.to_thread(parts.evidence_requests.failed, record.id, said.failed)
    parts.telemetry.evidence.labels(record.state).inc()
    return answer(views.evidence(record))


async def _take(parts: EvidenceNeeds, request: Request, record: EvidenceRequest) -> EvidenceRequest:
    """Return the record once the bundle is on disk. Raises Refusal."""
    declared = request.headers.get("content-length", "")
    limit = parts.config.evidence.bundle_bytes_max
    if declared.isascii() and declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    if parts.open_uploads.count >= UPLOADS_MAX:
        raise Refusal(503, "busy", f"{UPLOADS_MAX} bundles are being taken in", {"Retry-After": "1"})
    parts.open_uploads.count += 1
    try:
        incoming = await asyncio.to_thread(parts.evidence_requests.bundles.begin, record.id)
        try:
            async with asyncio.timeout(parts.config.evidence.upload_s):
                await _write(request, incoming, limit)
            return await asyncio.to_thread(parts.evidence_requests.received, record.id, incoming)
        finally:
            await asyncio.to_thread(incoming.discard)
    except NotGzip as error:
        raise Refusal(400, "not_gzip", f"{error}; send a gzipped tar") from None
    except TimeoutError:
        raise Refusal(408, "slow", f"it did not arrive within {parts.config.evidence.upload_s:g} s") from None
    except ClientDisconnect:
        raise Refusal(400, "truncated", "the connection ended before the body did") from None
    except OSError as error:
        raise Refusal(503, "storage", f"the bundle cannot be kept: {error}", {"Retry-After": "5"}) from None
    finally:
        parts.open_uploads.count -= 1


async def _write(request: Request, incoming: Incoming, limit: int) -> None:
    waiting: list[bytes] = []
    held = size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        waiting.append(chunk)
        held += len(chunk)
        if held >= WRITE_BYTES:
            await asyncio.to_thread(incoming.write, b"".join(waiting))
            waiting, held = [], 0
    await asyncio.to_thread(incoming.write, b"".join(waiting))


def _too_large(limit: int) -> Refusal:
    return Refusal(413, "oversized", f"a bundle may have {limit} bytes (evidence.bundle_bytes_max)")


def _asked_for(store: Store, incident: str) -> list[EvidenceRequest]:
    return store.page(EVIDENCE, {"incident_id": incident}, limit=PAGE_LIMIT_MAX).items


def _nodes(parts: EvidenceNeeds, incident: Incident) -> list[str]:
    """Return the incident's nodes, else its job's."""
    if incident.nodes:
        return incident.nodes
    job = parts.store.get(JOBS, incident.job)
    ranks = job.ranks if job is not None else []
    observed = parts.fleet.jobs().get(incident.job)
    ranks = ranks or (observed[1] if observed is not None else [])
    return list(dict.fromkeys(rank.node for rank in ranks))[: parts.config.evidence.nodes_max]


def _check(parts: EvidenceNeeds, nodes: list[str]) -> None:
    most = parts.config.evidence.nodes_max
    if not 0 < len(nodes) <= most:
        raise Refusal(400, "nodes", f"{len(nodes)} nodes; name 1 to {most} (evidence.nodes_max)")
    unknown = [node for node in nodes if parts.store.get(NODES, node) is None]
    if unknown:
        raise Refusal(
            404, "nodes", f"no agent of node {unknown[0][:80]!r} has ever reported; GET /api/v1/nodes lists them"
        )


def _request(
    parts: EvidenceNeeds, principal: Principal, incident: Incident, node: str, kind: EvidenceKind
) -> EvidenceRequest:
    now_s = parts.clock.now_s()
    within_s = BUG_REPORT_S if kind == "bug_report" else parts.config.evidence.within_s
    return EvidenceRequest(
        id=f"ev_{secrets.token_hex(16)}",
        incident_id=incident.id,
        node=node,
        job=incident.job,
        attempt=incident.attempt,
        kind=kind,
        state="asked",
        within_seconds=within_s,
        asked_by=principal.who,
        created_s=now_s,
        updated_s=now_s,
        expires_s=now_s + within_s + LATE_S,
    )
