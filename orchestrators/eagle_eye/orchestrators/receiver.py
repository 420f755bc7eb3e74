"""The webhook endpoint that every subscriber shares: verified, durable, idempotent, then handed on.

Standard Webhooks signatures, CloudEvents bodies. A 2xx answer means that the event is on disk.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import uvicorn
from standardwebhooks import Webhook, WebhookVerificationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from eagle_eye.orchestrators import cloudevent
from eagle_eye.orchestrators.acceptance import refusal
from eagle_eye.orchestrators.errors import OrchestratorError, UnacceptableEventError
from eagle_eye.orchestrators.ledger import Ledger
from eagle_eye.orchestrators.protocol import JobState
from eagle_eye.schema import problem
from eagle_eye.schema.action import (
    ACTION_EXPIRED,
    ACTION_REQUESTED,
    ACTION_WITHDRAWN,
    NODE_READMITTED,
    ActionRequest,
    ReportState,
)

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 1_048_576
WEBHOOK_ID_CHARACTERS_MAX = 256
QUEUE_MAX = 1_000
START_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Readmission:
    """Nodes that the server has let back in."""

    nodes: tuple[str, ...]


Work = ActionRequest | Readmission


class ReportTo(Protocol):
    """Takes a report on an action; returns once it is durable."""

    def __call__(self, action: ActionRequest, state: ReportState, detail: str) -> None:
        """The report will reach the server."""


@dataclass
class Intake:
    """What happens to a delivery: recorded in the ledger, refused with a report, or queued as work.

    ``secrets`` are the signing secrets that count now, two during a rotation; with none, nothing is accepted.
    """

    ledger: Ledger
    job_state: Callable[[str], JobState | None]
    report: ReportTo
    secrets: Callable[[], Sequence[str]]
    clock: Callable[[], float] = time.time
    work: queue.Queue[Work] = field(default_factory=lambda: queue.Queue(QUEUE_MAX))
    # Two deliveries at once must not overtake each other between the ledger and the queue.
    _order: threading.Lock = field(default_factory=threading.Lock)

    def signed(self, body: bytes, headers: dict[str, str]) -> str | None:
        """Return why the signature does not hold, None where it does; times may differ by 5 minutes."""
        reasons = [_verify(secret, body, headers) for secret in self.secrets()]
        return None if None in reasons else (reasons[0] if reasons else "no signing secret is known yet")

    def take(self, webhook_id: str, body: bytes) -> str:
        """The event is durable; returns what became of it. Raises UnacceptableEventError and queue.Full."""
        event = cloudevent.parse_event(body)
        with self._order:
            if self.ledger.seen(webhook_id):
                return "known"
            if self.work.full():
                raise queue.Full
            if event.type == ACTION_REQUESTED:
                return self._request(webhook_id, cloudevent.parse_action(event))
            if event.type in (ACTION_EXPIRED, ACTION_WITHDRAWN):
                action_id = cloudevent.parse_reference(event).action_id
                cancelled = self.ledger.withdraw(webhook_id, action_id, self.clock())
                return "cancelled" if cancelled else "nothing to cancel"
            if event.type == NODE_READMITTED:
                nodes = cloudevent.parse_nodes(event)
                self.ledger.record_delivery(webhook_id, self.clock())
                self.work.put_nowait(Readmission(tuple(nodes)))
                return "queued"
            # Heartbeats, pings, incidents: nothing to do but to say that they arrived.
            self.ledger.record_delivery(webhook_id, self.clock())
            return "acknowledged"

    def resume(self, *, interrupted: str) -> None:
        """Actions left by an earlier process are queued again; those it had begun are reported as failed."""
        for action in self.ledger.actions("begun"):
            self.ledger.finish(action.action_id)
            self.report(action, "failed", interrupted)
        for action in self.ledger.actions("queued"):
            self.work.put_nowait(action)

    def _request(self, webhook_id: str, action: ActionRequest) -> str:
        now_s = self.clock()
        if self.ledger.state_of(action.action_id) is not None:
            self.ledger.record_delivery(webhook_id, now_s)
            return "known"
        reason = refusal(action, self.job_state(action.job), now_s)
        # The report first: should this process end in between, the repeated delivery repeats it, whereas
        # a recorded action without a report would stay silent for good.
        self.report(action, "refused" if reason else "accepted", reason or "")
        self.ledger.record_action(webhook_id, action, "refused" if reason else "queued", now_s)
        if reason is not None:
            log.warning("action %s (%s) refused: %s", action.action_id, action.kind, reason)
            return "refused"
        self.work.put_nowait(action)
        return "queued"


def create_app(intake: Intake) -> Starlette:
    """Return the ASGI application: POST / takes deliveries, GET /healthz answers."""

    async def deliver(request: Request) -> Response:
        refused = _refused_by_headers(request)
        if refused is not None:
            return refused
        try:
            body = await _body(request)
        except ClientDisconnect:
            return _problem(400, "disconnected", "the body ended early")
        if body is None:
            return _problem(413, "body-too-large", f"the body is over {BODY_BYTES_MAX} bytes")
        unsigned = await run_in_threadpool(intake.signed, body, dict(request.headers))
        if unsigned is not None:
            return _problem(401, "bad-signature", unsigned)
        try:
            outcome = await run_in_threadpool(intake.take, request.headers["webhook-id"], body)
        except UnacceptableEventError as error:
            return _problem(400, "malformed-event", str(error))
        except queue.Full:
            busy = _problem(503, "busy", f"{QUEUE_MAX} actions wait already")
            busy.headers["retry-after"] = "5"
            return busy
        return JSONResponse({"outcome": outcome}, status_code=202 if outcome == "queued" else 200)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[Route("/", deliver, methods=["POST"]), Route("/healthz", health)],
        exception_handlers={
            404: lambda _, __: _problem(404, "not-found", "deliveries go to /"),
            405: lambda _, __: _problem(405, "method-not-allowed", "deliveries are sent by POST"),
            500: lambda _, __: _problem(500, "internal", "the delivery was not recorded; send it again"),
        },
    )


def listen_on(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one. Raises OrchestratorError where that is not possible."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128, reuse_port=False
        )
    except OSError as error:
        raise OrchestratorError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def url_of(listening: socket.socket) -> str:
    """Return where deliveries to the socket go."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


class Receiver:
    """Takes deliveries on a thread of its own, from ``start`` to ``stop``. The socket stays the caller's."""

    def __init__(self, intake: Intake, listening: socket.socket) -> None:
        self._socket = listening
        # asyncio and h11: the same behaviour whatever else is installed.
        self._server = uvicorn.Server(
            uvicorn.Config(
                create_app(intake), loop="asyncio", http="h11", ws="none", lifespan="off",
                log_config=None, log_level="warning", access_log=False, server_header=False, timeout_keep_alive=10,
                timeout_graceful_shutdown=3, limit_concurrency=64,
            )
        )  # fmt: skip
        self._thread = threading.Thread(target=self._serve, name="receiver", daemon=True)

    def start(self) -> None:
        """Deliveries are taken; raises OrchestratorError where the server does not come up."""
        self._thread.start()
        until_s = time.monotonic() + START_DEADLINE_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until_s:
                raise OrchestratorError(f"the receiver on {url_of(self._socket)} did not start")
            time.sleep(0.01)

    def stop(self) -> None:
        """No delivery is taken any more; those in progress were finished."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(START_DEADLINE_S)

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])


def _verify(secret: str, body: bytes, headers: dict[str, str]) -> str | None:
    try:
        Webhook(secret).verify(body, headers, json_parse=False)
    except WebhookVerificationError as error:
        return str(error)
    except ValueError:  # a signature that is no list or no base64, a body that is no UTF-8
        return "malformed signature or body"
    return None


def _refused_by_headers(request: Request) -> Response | None:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != cloudevent.CONTENT_TYPE:
        return _problem(415, "content-type", f"expected {cloudevent.CONTENT_TYPE}")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal():
        return _problem(400, "content-length", "expected a number of bytes")
    if int(length) > BODY_BYTES_MAX:
        return _problem(413, "body-too-large", f"the body is over {BODY_BYTES_MAX} bytes")
    if not 0 < len(request.headers.get("webhook-id", "")) <= WEBHOOK_ID_CHARACTERS_MAX:
        return _problem(401, "bad-signature", f"webhook-id: expected 1 to {WEBHOOK_ID_CHARACTERS_MAX} characters")
    return None


async def _body(request: Request) -> bytes | None:
    """Return the body, None as soon as it is longer than allowed (chunked bodies announce no length)."""
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > BODY_BYTES_MAX:
            return None
    return bytes(parts)


def _problem(status: int, reason: str, detail: str) -> JSONResponse:
    return JSONResponse(problem.problem(status, reason, detail), status_code=status, media_type=problem.CONTENT_TYPE)
