"""Uploads a bundle, or why there is none, to the server. Touches: one HTTP connection per attempt."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from eagle_eye.agent.loop.clock import Clock
from eagle_eye.agent.transport.server_connection import SYSTEMS, Trust, connect, path_on
from eagle_eye.agent.transport.servers import Servers
from eagle_eye.schema.backoff import Backoff

PATH = "/api/v1/evidence"
BUNDLE_TYPE = "application/gzip"
FAILURE_TYPE = "application/json"
ANSWER_BYTES_MAX = 1 << 16
BACKOFF_S_MIN, BACKOFF_S_MAX = 0.1, 5.0
PASSING = frozenset({401, 408, 429, 500, 502, 503, 504})  # transient: worth retrying; 401: a token that changes


@dataclass(frozen=True)
class UploadTarget:
    """Where bundles go, with the uplink's own settings. ``token`` returns the node's, "" where there is none."""

    servers: Servers
    token: Callable[[], str]
    trust: Trust = SYSTEMS
    connect_s: float = 2.0
    answer_s: float = 5.0


class _Answer(NamedTuple):
    status: int
    detail: str


class Upload:
    """Retries with backoff until the server has it, rejects it for good, or time is up."""

    def __init__(
        self, place: UploadTarget, clock: Clock, jitter: Callable[[], float] = random.random, path: str = PATH
    ) -> None:
        """``path`` plus a request's id is where it is uploaded."""
        self._place = place
        self._path = path
        self._clock = clock
        self._jitter = jitter

    def send(self, request_id: str, content: bytes, content_type: str, within_s: float, stop: threading.Event) -> str:
        """Return "" once the server has it, else why not. Gives up when ``stop`` is set."""
        until_s = self._clock.monotonic_s() + within_s
        backoff = Backoff(BACKOFF_S_MIN, BACKOFF_S_MAX, self._jitter)
        while True:
            try:
                answer = self._put(request_id, content, content_type, until_s)
            except (OSError, http.client.HTTPException) as error:
                said = f"the server cannot be reached: {type(error).__name__}: {error}"
            else:
                if answer.status == 200:
                    return ""
                said = f"the server answered {answer.status}: {answer.detail}".rstrip(": ")
                if answer.status not in PASSING:
                    return said
            wait_s = backoff.next_s()
            if self._clock.monotonic_s() + wait_s >= until_s or self._clock.wait(stop, wait_s):
                return said

    def _put(self, request_id: str, content: bytes, content_type: str, until_s: float) -> _Answer:
        place = self._place
        server = place.servers.current
        with contextlib.closing(connect(server, place.trust, place.connect_s, place.answer_s)) as connection:
            connection.sock.settimeout(max(0.01, until_s - self._clock.monotonic_s()))  # for the whole body
            headers = {"Content-Type": content_type}
            if token := place.token():
                headers["Authorization"] = f"Bearer {token}"
            # A server that rejects a request answers before it has read everything, and closes: its answer says why.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request("PUT", path_on(server, f"{self._path}/{request_id}"), body=content, headers=headers)
            connection.sock.settimeout(place.answer_s)
            response = connection.getresponse()
            return _Answer(response.status, _detail(response.read(ANSWER_BYTES_MAX)))


def _detail(content: bytes) -> str:
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        return ""
    detail = fields.get("detail") if isinstance(fields, dict) else None
    return detail[:300] if isinstance(detail, str) else ""
