"""Completes /openapi.json with what FastAPI does not find: errors, request and answer bodies, and required scopes."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import msgspec
from fastapi import FastAPI, Response

from eagle_eye.schema.frame import CONTENT_TYPE as FRAMES_TYPE
from eagle_eye.schema.problem import CONTENT_TYPE
from eagle_eye.schema.rows import CONTENT_TYPE as ROWS_TYPE
from eagle_eye.server.api import answers
from eagle_eye.server.ingest import frames as ingest
from eagle_eye.server.ingest.remote_write import endpoint

# The endpoints outside FastAPI: agents' frames and Prometheus remote write.

_BINARY = {"type": "string", "format": "binary"}
_COUNTED = {"type": "integer", "minimum": 0}


def operations() -> dict[str, dict[str, Any]]:
    """Return the operations by path, as OpenAPI has them."""
    return {ingest.PATH: {"post": _frames()}, endpoint.PATH: {"post": _write()}}


def _frames() -> dict[str, Any]:
    encoding = {"type": "string", "enum": ["identity", "deflate"]}
    return {
        "tags": ["telemetry"],
        "summary": "Frames",
        "description": "An agent's frames, whole or as rows (docs/reference/wire.md). Taken whole or refused whole.",
        "operationId": "frames_api_v1_frames_post",
        "parameters": [_header("Content-Encoding", encoding, "Of rows; whole frames have none.", required=False)],
        "requestBody": {
            "required": True,
            "content": {FRAMES_TYPE: {"schema": dict(_BINARY)}, ROWS_TYPE: {"schema": dict(_BINARY)}},
        },
        "responses": {"200": {"description": "They are durable up to the watermark."}},
    }


def _write() -> dict[str, Any]:
    encoding = {"type": "string", "enum": ["snappy"]}
    return {
        "tags": ["telemetry"],
        "summary": "Remote Write",
        "description": "Prometheus remote write 1.0 and 2.0; the content type's parameter `proto` says which. 400 where"
        " samples are left out that should not have been sent; the others are kept.",
        "operationId": "write_api_v1_write_post",
        "parameters": [_header("Content-Encoding", encoding, "How the body is compressed.", required=True)],
        "requestBody": {
            "required": True,
            "content": {
                f"{endpoint.MEDIA_TYPE};proto={proto}": {"schema": dict(_BINARY)}
                for proto in (endpoint.V1, endpoint.V2)
            },
        },
        "responses": {
            "204": {
                "description": "All that says something to this server is durable.",
                "headers": {
                    name: {"description": "Of version 2.0.", "schema": dict(_COUNTED)} for name in endpoint.WRITTEN
                },
            }
        },
    }


def _header(name: str, schema: dict[str, Any], said: str, *, required: bool) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": required, "description": said, "schema": schema}


# The endpoints of FastAPI.

OPEN = frozenset({"/healthz", "/leadz", "/readyz"})  # without authentication
MAY_BE_ABSENT = frozenset({"/api/v1/sessions/end"})  # 404 where people do not sign in here
# Of the answers that are not JSON.
CONTENT_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "/metrics": "text/plain",
        "/api/v1/events": "text/event-stream",
        "/api/v1/jobs/{job}/recording": "application/x-eagle-eye-recording",
        "/api/v1/evidence/{evidence}/bundle": "application/gzip",
    }
)
# Of the request bodies that are not JSON.
UPLOADS = frozenset({("/api/v1/evidence/{evidence}", "put"), *((path, "post") for path in operations())})
_UPLOAD: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "application/gzip": {"type": "string", "format": "binary"},
        "application/json": {
            "type": "object",
            "required": ["failed"],
            "properties": {"failed": {"type": "string"}},
        },
    }
)
_PROBLEM: Mapping[str, Any] = MappingProxyType(
    {
        "type": "object",
        "description": "Problem details (RFC 9457); reason is one stable word.",
        "required": ["type", "title", "status", "detail", "reason"],
        "properties": {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
            "reason": {"type": "string"},
        },
    }
)


def describe(app: FastAPI) -> None:
    """Complete the app's OpenAPI document with what every endpoint answers."""
    found = app.openapi

    def complete() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = found()
            components = document.setdefault("components", {})
            schemas = components.setdefault("schemas", {})
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            schemas["Problem"] = dict(_PROBLEM)
            reported, more = answers.schemas("#/components/schemas/{name}")
            schemas.update(more)
            components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            document["paths"].update(operations())
            for path, methods in document["paths"].items():
                for method, operation in methods.items():
                    _complete(path, method, operation)
                    if (method, path) in reported:
                        _describe(operation["responses"], reported[method, path])
        assert app.openapi_schema is not None  # noqa: S101 - found() keeps it
        return app.openapi_schema

    app.openapi = complete  # type: ignore[method-assign]
    written: list[bytes] = []

    @app.get("/openapi.json", include_in_schema=False)
    async def document() -> Response:
        """Answer with the document, which is open to everybody and so is written but once."""
        if not written:
            written.append(msgspec.json.encode(complete()))
        return Response(written[0], media_type="application/json")


def _complete(path: str, method: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    for parameter in operation.get("parameters", []):
        parameter["schema"] = _without_null(parameter["schema"])
    # FastAPI declares 422 for what is 400 here.
    responses.pop("422", None)
    if path == "/api/v1/evidence/{evidence}" and method == "put":
        content = {kind: {"schema": dict(schema)} for kind, schema in _UPLOAD.items()}
        operation["requestBody"] = {"required": True, "content": content}
    if path in CONTENT_TYPES:
        responses["200"]["content"] = {CONTENT_TYPES[path]: {"schema": {"type": "string"}}}
    for status in _statuses(path, method, operation):
        responses[str(status.value)] = {
            "description": status.phrase,
            "content": {CONTENT_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
    if path == "/readyz":
        responses["503"] = {"description": "It cannot judge; the checks say why."}
    if path == "/leadz":
        responses["503"] = {"description": "It stands by."}
    if path not in OPEN:
        operation["security"] = [{"token": []}]


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an optional parameter without null, which no request can send."""
    kinds = [kind for kind in schema.get("anyOf", []) if kind != {"type": "null"}]
    if len(kinds) != 1:
        return schema
    return {**kinds[0], **{name: value for name, value in schema.items() if name != "anyOf"}}


def _describe(responses: dict[str, Any], schema: Any) -> None:
    """Set the schema of the successful answers."""
    for answer in responses.values():
        if CONTENT_TYPE not in answer.get("content", {}):
            answer["content"] = {"application/json": {"schema": schema}}


def _statuses(path: str, method: str, operation: dict[str, Any]) -> list[HTTPStatus]:
    if path in OPEN:
        return []
    statuses = [
        HTTPStatus.UNAUTHORIZED,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.SERVICE_UNAVAILABLE,
    ]
    if operation.get("parameters") or "requestBody" in operation:
        statuses.append(HTTPStatus.BAD_REQUEST)
    if "{" in path or path in MAY_BE_ABSENT:
        statuses.append(HTTPStatus.NOT_FOUND)
    if method != "get":
        statuses.append(HTTPStatus.CONFLICT)
    if "requestBody" in operation:
        statuses += [HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE]
    if (path, method) in UPLOADS:
        statuses.append(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
    return statuses
