"""The webhook endpoint shared by all subscribers: verified, durable, idempotent, then handed on.

Standard Webhooks signatures, CloudEvents bodies. A 2xx answer means that the event is on disk.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
import time
from collections.abc import Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from eagle_eye.orchestrators import cloudevent
from eagle_eye.orchestrators.errors import LowerEpochError, OrchestratorError, UnacceptableEventError
from eagle_eye.orchestrators.intake import QUEUE_MAX, WebhookIntake
from eagle_eye.schema import problem
from eagle_eye.schema.action import EPOCH_HEADER
from eagle_eye.schema.service import why_not_listening

BODY_BYTES_MAX = 1_048_576
BODY_S_MAX = 10.0
WEBHOOK_ID_CHARACTERS_MAX = 256
START_DEADLINE_S = 10.0


def create_app(intake: WebhookIntake, pages: Sequence[Route] = ()) -> Starlette:
    """Return the ASGI application: POST / takes deliveries; GET /healthz and ``pages`` answer."""

    async def deliver(request: Request) -> Response:
        refused = _refused_by_headers(request)
        if refused is not None:
            return refused
        try:
            async with asyncio.timeout(BODY_S_MAX):
                body = await _body(request)
        except ClientDisconnect:
            return _problem(400, "disconnected", "the body ended early")
        except TimeoutError:
            slow = _problem(408, "slow", f"the body did not arrive within {BODY_S_MAX:g} s")
            slow.headers["connection"] = "close"
            return slow
        if body is None:
            return _problem(413, "body-too-large", f"the body is over {BODY_BYTES_MAX} bytes")
        unsigned = await run_in_threadpool(intake.signed, body, dict(request.headers))
        if unsigned is not None:
            intake.count("bad signature")
            return _problem(401, "bad-signature", unsigned)
        return await run_in_threadpool(_taken, intake, request.headers["webhook-id"], body)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[Route("/", deliver, methods=["POST"]), *(pages or [Route("/healthz", health)])],
        exception_handlers={
            404: lambda _, __: _problem(404, "not-found", "deliveries go to /"),
            405: lambda _, __: _problem(405, "method-not-allowed", "deliveries are sent by POST"),
            500: lambda _, __: _problem(500, "internal", "the delivery was not recorded; send it again"),
        },
    )


def listen_on(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 picks a free one. Raises OrchestratorError where that is not possible."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128, reuse_port=False
        )
    except OSError as error:
        raise OrchestratorError(
            f"{why_not_listening(error, host, port)}; --listen takes another address or port"
        ) from None


def url_of(listening: socket.socket) -> str:
    """Return the URL for deliveries to the socket."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


class Receiver:
    """Accepts deliveries on its own thread, from ``start`` to ``stop``. The caller keeps the socket."""

    def __init__(self, intake: WebhookIntake, listening: socket.socket, pages: Sequence[Route] = ()) -> None:
        self._socket = listening
        # asyncio and h11: the same behaviour whatever else is installed.
        self._server = uvicorn.Server(
            uvicorn.Config(
                create_app(intake, pages), loop="asyncio", http="h11", ws="none", lifespan="off",
                log_config=None, log_level="warning", access_log=False, server_header=False, timeout_keep_alive=10,
                timeout_graceful_shutdown=3, limit_concurrency=64,
            )
        )  # fmt: skip
        self._thread = threading.Thread(target=self._serve, name="receiver", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether deliveries are accepted."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start accepting deliveries. Raises OrchestratorError where the server does not come up."""
        self._thread.start()
        until_s = time.monotonic() + START_DEADLINE_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until_s:
                raise OrchestratorError(f"the receiver on {url_of(self._socket)} did not start")
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop accepting deliveries; finish those in progress."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(START_DEADLINE_S)

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])


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


def _taken(intake: WebhookIntake, webhook_id: str, body: bytes) -> Response:
    try:
        outcome = intake.take(webhook_id, body)
    except UnacceptableEventError as error:
        intake.count("malformed")
        return _problem(400, "malformed-event", str(error))
    except LowerEpochError as error:
        intake.count("lower epoch")
        lower = _problem(409, "epoch", str(error))
        lower.headers[EPOCH_HEADER] = str(error.seen)
        return lower
    except queue.Full:
        intake.count("busy")
        busy = _problem(503, "busy", f"{QUEUE_MAX} actions wait already")
        busy.headers["retry-after"] = "5"
        return busy
    intake.count(outcome)
    return JSONResponse({"outcome": outcome}, status_code=202 if outcome == "queued" else 200)


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
