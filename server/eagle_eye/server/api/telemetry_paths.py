"""OpenAPI descriptions of the endpoints outside FastAPI: agents' frames and Prometheus remote write."""

from __future__ import annotations

from typing import Any

from eagle_eye.schema.frame import CONTENT_TYPE as FRAMES_TYPE
from eagle_eye.schema.rows import CONTENT_TYPE as ROWS_TYPE
from eagle_eye.server.ingest import frames_endpoint as ingest
from eagle_eye.server.ingest.remote_write import endpoint

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
