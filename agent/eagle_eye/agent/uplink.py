"""Sends the spool's frames to the server and forgets what the server has.

Touches: one HTTP connection, the token's file, one thread. ``docs/wire.md`` is the protocol.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import random
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from eagle_eye.agent.clock import Clock
from eagle_eye.agent.drops import Drops
from eagle_eye.agent.spool import Spool
from eagle_eye.schema.frame import CONTENT_TYPE, encode_request

PATH = "/api/v1/frames"
FRAMES_PER_REQUEST = 256
BYTES_PER_REQUEST = 4 << 20
ANSWER_BYTES_MAX = 1 << 16
BACKOFF_S_MIN = 0.1
RETRY_AFTER_S_MAX = 300.0

_log = logging.getLogger("eagle_eye.agent")


@dataclass(frozen=True)
class Destination:
    """Where frames go. ``token_file`` None: no token. Times in seconds."""

    server: str
    token_file: Path | None = None
    ca_file: Path | None = None
    connect_s: float = 2.0
    answer_s: float = 5.0
    backoff_s_max: float = 5.0


class Answer(NamedTuple):
    """The server's answer; ``reason`` is the problem's stable word, ``retry_after_s`` None when not said."""

    status: int
    watermark: int | None
    reason: str
    detail: str
    retry_after_s: float | None


class Uplink:
    """Delivers at least once and in order; never gives up and never hurries a server that is in trouble."""

    def __init__(
        self,
        destination: Destination,
        spool: Spool,
        drops: Drops,
        clock: Clock,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._destination = destination
        self._spool = spool
        self._drops = drops
        self._clock = clock
        self._jitter = jitter
        self._connection: http.client.HTTPConnection | None = None
        self._token = ""
        self._failures = 0
        self._frames_max = FRAMES_PER_REQUEST
        self._said = ""
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._stop_s: float | None = None
        self._thread: threading.Thread | None = None
        self.delivered = 0

    def start(self) -> None:
        """Begin to send."""
        self._token = self._read_token()
        self._thread = threading.Thread(target=self._run, name="uplink", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Say that the spool has something new."""
        self._news.set()

    def stop(self, flush_s: float) -> None:
        """Send what waits for at most ``flush_s`` and end; what is left stays in the spool."""
        self._stop_s = self._clock.monotonic_s() + flush_s
        self._stopping.set()
        self._news.set()
        if self._thread is not None:
            self._thread.join(timeout=flush_s + 0.1)
        self._disconnect()

    def send_once(self) -> float | None:
        """Send one batch; return how many seconds to wait before the next, None when there was nothing to send."""
        batch = self._spool.oldest(self._frames_max, BYTES_PER_REQUEST)
        if not batch:
            self._frames_max = FRAMES_PER_REQUEST
            return None
        body = encode_request([frame for _, frame in batch], self._clock.now_s())
        try:
            answer = self._post(body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._disconnect()
            self._say(f"server {self._destination.server} cannot be reached: {type(error).__name__}: {error}")
            return self._backoff_s()
        return self._judge(answer, batch)

    def _run(self) -> None:
        while True:
            self._news.clear()
            try:
                wait_s = self.send_once()
            except Exception:  # noqa: BLE001 - the one thread that speaks for the node must not end
                _log.exception("sending failed in a way that is a mistake of ours; trying again")
                wait_s = self._backoff_s()
            if self._stop_s is not None and (
                wait_s is None or self._clock.monotonic_s() + (wait_s or 0.0) >= self._stop_s
            ):
                return
            if wait_s is None:
                self._clock.wait(self._news, 60.0)
            elif wait_s > 0.0:
                self._clock.wait(self._stopping, wait_s)

    def _judge(self, answer: Answer, batch: list[tuple[int, bytes]]) -> float:
        first, last = batch[0][0], batch[-1][0]
        if answer.status == 200 and answer.watermark is not None and answer.watermark >= first:
            self._say("")
            self._failures = 0
            self._frames_max = FRAMES_PER_REQUEST
            acknowledged = min(answer.watermark, last)  # no server can have what was not sent
            self.delivered += sum(1 for sequence, _ in batch if sequence <= acknowledged)
            self._spool.acknowledge(acknowledged)
            return 0.0
        detail = answer.detail or ("it acknowledged nothing" if answer.status == 200 else "")
        said = f"server answered {answer.status} {answer.reason}: {detail}".rstrip(": ")
        if answer.status in (400, 413, 422):
            if len(batch) > 1:
                self._frames_max = 1  # find the one that the server does not want
            else:
                self._drops.count(f"rejected_{answer.reason or answer.status}")
                _log.warning("frame %d is dropped: %s", first, said)
                self._spool.discard(first)
            return 0.0
        self._say(said)
        if answer.status in (401, 403):
            token = self._read_token()
            if token != self._token:
                self._token = token
                return 0.0
        if answer.retry_after_s is not None and answer.status in (429, 503):
            return min(answer.retry_after_s, RETRY_AFTER_S_MAX)
        return self._backoff_s()

    def _backoff_s(self) -> float:
        """Return the next wait: doubling, bounded, and anywhere between half and whole, so that a fleet spreads."""
        self._failures += 1
        whole_s = min(self._destination.backoff_s_max, BACKOFF_S_MIN * 2.0 ** min(self._failures - 1, 30))
        return whole_s * (0.5 + 0.5 * self._jitter())

    def _post(self, body: bytes) -> Answer:
        connection = self._connect()
        headers = {"Content-Type": CONTENT_TYPE, "Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        prefix = urlsplit(self._destination.server).path.rstrip("/")
        connection.request("POST", prefix + PATH, body=body, headers=headers)
        response = connection.getresponse()
        content = response.read(ANSWER_BYTES_MAX + 1)
        if len(content) > ANSWER_BYTES_MAX or response.will_close:
            self._disconnect()
        return _answer(response.status, response.getheader("Retry-After"), content)

    def _connect(self) -> http.client.HTTPConnection:
        if self._connection is not None:
            return self._connection
        destination = self._destination
        parts = urlsplit(destination.server)
        host = parts.hostname or ""
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=destination.ca_file)
            connection = http.client.HTTPSConnection(host, parts.port, timeout=destination.connect_s, context=context)
        else:
            connection = http.client.HTTPConnection(host, parts.port, timeout=destination.connect_s)
        connection.connect()
        connection.sock.settimeout(destination.answer_s)
        self._connection = connection
        return connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _read_token(self) -> str:
        file = self._destination.token_file
        if file is None:
            return ""
        try:
            token = file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            self._say(f"token file {file} cannot be read: {type(error).__name__}")
            return self._token
        if not token.isprintable() or " " in token:
            self._say(f"token file {file} holds no token: expected one line of printable characters")
            return self._token
        return token

    def _say(self, text: str) -> None:
        """Log a change of state once; empty: all is well."""
        if text != self._said:
            self._said = text
            if text:
                _log.warning("%s", text)
            else:
                _log.info("server %s takes frames", self._destination.server)


def _answer(status: int, retry_after: str | None, content: bytes) -> Answer:
    fields: dict[str, object] = {}
    with contextlib.suppress(ValueError, RecursionError):  # not JSON: the status alone says enough
        parsed = json.loads(content)
        if isinstance(parsed, dict):
            fields = parsed
    watermark = fields.get("watermark")
    reason, detail = fields.get("reason"), fields.get("detail")
    return Answer(
        status,
        watermark if type(watermark) is int else None,
        _word(reason) if isinstance(reason, str) else "",
        detail[:300] if isinstance(detail, str) else "",
        float(retry_after) if retry_after and retry_after.isascii() and retry_after.isdecimal() else None,
    )


def _word(text: str) -> str:
    """Return the reason as one word that may become part of a counter's name."""
    return "".join(char if char.isalnum() or char == "_" else "_" for char in text[:40])
