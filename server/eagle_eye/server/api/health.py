"""/healthz, /readyz, /leadz, /api/v1/leader and /metrics."""

from __future__ import annotations

from typing import Annotated, Protocol

from fastapi import APIRouter, Depends, Response
from prometheus_client import CONTENT_TYPE_LATEST

from eagle_eye.server.api.requests import Reader, answer, services
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.timestamps import rfc3339
from eagle_eye.server.monitor.readiness import Doctor
from eagle_eye.server.store.leadership import Leadership
from eagle_eye.server.telemetry.counters import Telemetry

router = APIRouter(tags=["health"])


class Needs(Protocol):
    """The server's components that this module uses."""

    clock: Clock
    config: ServerConfig
    doctor: Doctor
    leadership: Leadership | None
    stands_by: bool
    telemetry: Telemetry


Parts = Annotated[Needs, Depends(services)]


@router.get("/healthz")
def healthz() -> Response:
    """The process is up."""
    return answer({"status": "up"})


@router.get("/readyz")
def readyz(parts: Parts) -> Response:
    """Whether the server can judge: 503 names what is missing. Detectors that see nothing are named either way.

    This is for alarms. A load balancer that obeys it would keep the agents away whose frames end the blindness.
    """
    readiness = parts.doctor.check()
    return answer(readiness._asdict(), 200 if readiness.ready else 503)


@router.get("/leadz")
def leadz(parts: Parts) -> Response:
    """Whether this server leads, of those that share a database: 200, else 503. For load balancers."""
    leadership = parts.leadership
    if leadership is None:
        return answer({"leads": True, "leader": parts.config.public_url, "epoch": 0})
    leads = leadership.leads and not parts.stands_by
    said = {"leads": leads, "leader": leadership.leader_url, "epoch": leadership.epoch}
    return answer(said, 200 if leads else 503)


@router.get("/api/v1/leader")
def get_leader(parts: Parts, _: Reader) -> Response:
    """Which server leads, of those that share a database, as this one knows it: each answers for itself.

    ``seen_since`` is when this server first knew of this leader with this epoch, null where the records are this
    server's alone; ``problem`` says why it cannot tell who leads, or why the leader must not decide at present.
    ``nodes_in_vain`` are the nodes that ask this server and do not reach the leader, while it stands by.
    """
    leadership = parts.leadership
    if leadership is None:
        alone = {"leads": True, "leader": parts.config.public_url, "epoch": 0, "seen_since": None, "problem": ""}
        return answer({**alone, "nodes_in_vain": 0})
    leads = leadership.leads and not parts.stands_by
    return answer(
        {
            "leads": leads,
            "leader": leadership.leader_url,
            "epoch": leadership.epoch,
            "seen_since": rfc3339(parts.clock.now_s() - leadership.seen_for_s()),
            "problem": leadership.problem() if leads else leadership.lease_problem,
            "nodes_in_vain": leadership.nodes_in_vain(),
        }
    )


@router.get("/metrics")
def metrics(parts: Parts, _: Reader) -> Response:
    """Prometheus' text format: the server's own metrics and the newest value of each series."""
    parts.doctor.is_ready()  # so that eagle_eye_ready is current
    return Response(parts.telemetry.text(), media_type=CONTENT_TYPE_LATEST)
