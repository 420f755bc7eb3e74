"""Every error of the API as problem details (RFC 9457)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from eagle_eye.schema.problem import CONTENT_TYPE, problem
from eagle_eye.server.errors import (
    NO_HEADERS,
    BadCursor,
    HistoryUnavailable,
    IllegalTransition,
    Refusal,
    StoreUnavailable,
    TargetRefused,
)
from eagle_eye.server.telemetry import Telemetry

_log = logging.getLogger(__name__)
_RETRY: Mapping[str, str] = {"Retry-After": "5"}
_REASONS = {404: "not_found", 405: "method"}


def install(app: FastAPI, telemetry: Telemetry) -> None:
    """Have every error answered as a problem document and counted by reason."""

    def respond(status: int, reason: str, detail: str, headers: Mapping[str, str] = NO_HEADERS) -> Response:
        telemetry.refused.labels(reason).inc()
        document = msgspec.json.encode(problem(status, reason, detail))
        return Response(document, status, dict(headers), media_type=CONTENT_TYPE)

    async def on_refusal(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)  # noqa: S101 - registered for it
        return respond(error.status, error.reason, error.detail, error.headers)

    async def on_cursor(_: Request, error: Exception) -> Response:
        return respond(400, "cursor", str(error))

    async def on_transition(_: Request, error: Exception) -> Response:
        return respond(409, "state", str(error))

    async def on_target(_: Request, error: Exception) -> Response:
        return respond(400, "target", str(error))

    async def on_storage(_: Request, error: Exception) -> Response:
        return respond(503, "storage", str(error), _RETRY)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 - registered for it
        reason = _REASONS.get(error.status_code, "http")
        details = {
            "not_found": "nothing is here; /openapi.json lists what there is",
            "method": f"{request.method} does not apply here; /openapi.json lists what does",
        }
        detail = details.get(reason, str(error.detail))
        return respond(error.status_code, reason, detail, error.headers or NO_HEADERS)

    async def on_validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for it
        return respond(400, "parameter", "; ".join(_parameter(item) for item in error.errors())[:2000])

    async def on_bug(request: Request, error: Exception) -> Response:
        # Only the kind of error leaves the process; what it says may hold anything.
        said = {"method": request.method, "path": request.url.path}
        _log.error("a request failed for a reason that was not foreseen", exc_info=error, extra=said)
        telemetry.failures.labels("api").inc()
        return respond(500, "internal", "the server failed; its log says why")

    app.add_exception_handler(Refusal, on_refusal)
    app.add_exception_handler(BadCursor, on_cursor)
    app.add_exception_handler(IllegalTransition, on_transition)
    app.add_exception_handler(TargetRefused, on_target)
    app.add_exception_handler(StoreUnavailable, on_storage)
    app.add_exception_handler(HistoryUnavailable, on_storage)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(Exception, on_bug)


def _parameter(item: Mapping[str, object]) -> str:
    where = item.get("loc", ())
    name = ".".join(str(part) for part in where[1:]) if isinstance(where, tuple) else ""
    return f"{name or 'request'}: {item.get('msg', 'is not as expected')}"
