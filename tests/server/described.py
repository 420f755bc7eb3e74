"""Holds what a server answers against what its description says: every test that asks over HTTP is a test of it."""

from __future__ import annotations

import re

import httpx
import msgspec

from eagle_eye.server.api.answers import ANSWERS

_PATHS = [
    (method.upper(), re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), shape) for (method, path), shape in ANSWERS.items()
]


def check_answer(response: httpx.Response) -> None:
    """Return if the answer is as described, or is no JSON that an endpoint answers with."""
    if response.headers.get("content-type") != "application/json":
        return
    path = response.request.url.raw_path.decode().partition("?")[0]
    for method, pattern, shape in _PATHS:
        if method == response.request.method and pattern.fullmatch(path):
            response.read()
            try:
                msgspec.json.decode(response.content, type=shape)
            except msgspec.ValidationError as error:
                raise AssertionError(f"{method} {path} is not answered as described: {error}") from error
