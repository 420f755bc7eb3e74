"""Returns every error of the API as problem details (RFC 9457)."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from eagle_eye.schema.near_names import did_you_mean
from eagle_eye.schema.problem import CONTENT_TYPE, problem
from eagle_eye.server.model.errors import (
    NO_HEADERS,
    BadCursor,
    HistoryUnavailable,
    IllegalTransition,
    Refusal,
    StoreUnavailable,
    TargetRefused,
)
from eagle_eye.server.telemetry.counters import Telemetry
from eagle_eye.server.transport import methods

_log = logging.getLogger(__name__)
_RETRY: Mapping[str, str] = {"Retry-After": "5"}


def install(app: FastAPI, telemetry: Telemetry) -> None:
    """Install handlers that answer every error with a problem document and count it by reason."""

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
        return await on_refusal(request, _refusal(app, request, error))

    async def on_validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for it
        return respond(400, "parameter", "; ".join(_parameter(item) for item in error.errors())[:2000])

    async def on_bug(request: Request, error: Exception) -> Response:
        # Only the type of error is sent; its text may contain anything.
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


def _refusal(app: FastAPI, request: Request, error: HTTPException) -> Refusal:
    if error.status_code == 405:  # starlette names the methods of one of the path's routes
        return methods.refusal(request.method, methods.of_route(app, request.scope))
    if error.status_code == 404:
        return Refusal(404, "not_found", "nothing is here; /openapi.json lists what there is")
    return Refusal(error.status_code, "http", str(error.detail), error.headers or NO_HEADERS)


def _parameter(item: Mapping[str, object]) -> str:
    where = item.get("loc", ())
    name = ".".join(str(part) for part in where[1:]) if isinstance(where, tuple) else ""
    return f"{name or 'request'}: {_complaint(item)}"


def _complaint(item: Mapping[str, object]) -> str:
    said = str(item.get("msg", "is not as expected")).removeprefix("Value error, ")
    given = item.get("input")
    if item.get("type") == "literal_error" and isinstance(given, str):
        known = re.findall(r"'([^']*)'", said)
        return f"{given[:80]!r} is unknown; expected one of {', '.join(known)}{did_you_mean(given, known)}"
    return said
