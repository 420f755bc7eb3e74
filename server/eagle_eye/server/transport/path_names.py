"""Names of jobs and nodes in a request's path: a ``%2F`` belongs to the name, a plain slash ends it. Pure.

ASGI hands the path over decoded, where both look alike; its ``raw_path`` tells them apart.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any
from urllib.parse import unquote

from starlette.convertors import Convertor, register_url_convertor

# What precedes a name.
_HEADS = tuple(tuple(head.encode().split(b"/")) for head in ("/api/v1/jobs", "/api/v1/nodes", "/api/v1/nvrx"))
_SLASH = "\uffff"  # stands for a name's own slash until the route is found; never a part of a name: it is no character


class _Name(Convertor[str]):
    """One segment of a path, ``{job:name}``, with the slashes that are its own."""

    regex = "[^/]+"

    def convert(self, value: str) -> str:
        return value.replace(_SLASH, "/")

    def to_string(self, value: str) -> str:
        return value.replace("/", _SLASH)


def register() -> None:
    """Paths of routes that are made from now on may have names in them."""
    register_url_convertor("name", _Name())


def routed(scope: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Return the request's scope with a path whose slashes all part segments; the scope itself where they do."""
    raw: bytes = scope.get("raw_path") or b""
    if b"%2f" not in raw.lower():
        return scope
    segments = raw.split(b"/")
    head, rest = segments[:4], segments[4:]
    if tuple(head) not in _HEADS or not rest:
        return scope
    name, *more = (unquote(segment.decode("ascii", "replace")) for segment in rest)
    return {**scope, "path": "/".join([*(part.decode() for part in head), name.replace("/", _SLASH), *more])}
