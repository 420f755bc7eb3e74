"""Names of jobs and nodes in a request's path: ``%2F`` is part of the name, a plain slash ends it. Pure.

ASGI passes the path decoded, where both look the same; its ``raw_path`` distinguishes them.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any
from urllib.parse import unquote

from starlette.convertors import Convertor, register_url_convertor

# What precedes a name.
_HEADS = tuple(tuple(head.encode().split(b"/")) for head in ("/api/v1/jobs", "/api/v1/nodes", "/api/v1/nvrx"))
_SLASH = "\uffff"  # replaces a name's own slashes during routing; a noncharacter, so never part of a name


class _Name(Convertor[str]):
    """A path parameter ``{job:name}``: one segment, which may contain encoded slashes."""

    regex = "[^/]+"

    def convert(self, value: str) -> str:
        return value.replace(_SLASH, "/")

    def to_string(self, value: str) -> str:
        return value.replace("/", _SLASH)


def register() -> None:
    """Register the converter, so that routes created from now on may use ``{...:name}``."""
    register_url_convertor("name", _Name())


def routed(scope: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Return the request's scope with encoded slashes replaced in the path; the same scope if there are none."""
    raw: bytes = scope.get("raw_path") or b""
    if b"%2f" not in raw.lower():
        return scope
    segments = raw.split(b"/")
    head, rest = segments[:4], segments[4:]
    if tuple(head) not in _HEADS or not rest:
        return scope
    name, *more = (unquote(segment.decode("ascii", "replace")) for segment in rest)
    return {**scope, "path": "/".join([*(part.decode() for part in head), name.replace("/", _SLASH), *more])}
