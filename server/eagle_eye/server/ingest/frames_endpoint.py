"""POST /api/v1/frames: makes an agent's frames durable; each request is accepted or refused as a whole.

A plain ASGI endpoint in front of the API: it reads bodies with a limit and avoids the cost of routing. Frames come
whole (version 1 of the wire format) or as rows (version 2); ``RowsIngest`` handles both once decoded. Fields of newer
agents that this server does not know are ignored, counted, and named in the log and in the answer. The history keeps
them: a newer server can read them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from eagle_eye.schema.frame import CONTENT_TYPE, KEPT_HEADER
from eagle_eye.schema.problem import CONTENT_TYPE as PROBLEM_TYPE
from eagle_eye.schema.rows import CONTENT_TYPE as ROWS_CONTENT_TYPE
from eagle_eye.server.ingest.frame_rules import KEPT_DIGITS_MAX, RETRY_UNAVAILABLE_S, Authenticator
from eagle_eye.server.ingest.rows_ingest import RowsIngest
from eagle_eye.server.ingest.rows_request import Request, RowsReader, read_whole
from eagle_eye.server.ingest.settings import IngestSettings
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal, StoreUnavailable
from eagle_eye.server.security.auth import Credentials, Principal
from eagle_eye.server.telemetry.counters import Telemetry
from eagle_eye.server.transport import methods
from eagle_eye.server.transport.raw_http import ASGIMessage, Receive, Send, answer, headers_of, read_body, refuse

PATH = "/api/v1/frames"
DECODE_INLINE_BYTES_MAX = 1 << 16  # larger bodies are decoded in a thread, so that the event loop stays responsive

_log = logging.getLogger(__name__)


class Ingest:
    """The endpoint. ``admit(principal)`` raises Refusal 429 where requests come too often."""

    def __init__(
        self,
        settings: IngestSettings,
        auth: Authenticator,
        telemetry: Telemetry,
        clock: Clock,
        admit: Callable[[Principal], None],
        rows: RowsIngest,
        reader: RowsReader,
    ) -> None:
        self.rows = rows
        self._settings = settings
        self._auth = auth
        self._telemetry = telemetry
        self._clock = clock
        self._admit = admit
        self._reader = reader

    async def __call__(self, scope: ASGIMessage, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            status, document, extra = await self._answer(scope, receive)
        except Refusal as refusal:
            self._telemetry.rejected.labels(refusal.reason).inc()
            await refuse(send, refusal)
        except StoreUnavailable as error:  # the token cannot be looked up
            self._telemetry.rejected.labels("storage").inc()
            await refuse(send, Refusal(503, "storage", str(error), {"Retry-After": str(RETRY_UNAVAILABLE_S)}))
        except Exception:  # noqa: BLE001 - no outer layer answers and counts errors of this endpoint
            _log.exception("frames could not be taken for a reason that was not foreseen")
            self._telemetry.rejected.labels("internal").inc()
            await refuse(send, Refusal(500, "internal", "the server failed; its log says why"))
        else:
            await answer(send, status, "application/json" if status == 200 else PROBLEM_TYPE, document, extra)

    async def _answer(self, scope: ASGIMessage, receive: Receive) -> tuple[int, bytes, Mapping[str, str]]:
        """Return status, body and headers once the request's frames are durable or have failed. Raises Refusal."""
        started_s = self._clock.monotonic_s()
        headers = headers_of(scope)
        if scope["method"] != "POST":
            raise methods.refusal(scope["method"], ["POST"])
        principal = self._auth.authenticate(Credentials.of(scope["method"], headers, scope.get("state", {})))
        self._admit(principal)
        content_type, encoding = _content(headers)
        limit, timeout_s = self._settings.body_bytes_max, self._settings.body_timeout_s
        body = await read_body(receive, headers, limit, timeout_s, "ingest.body_bytes_max")
        received_s = self._clock.now_s()
        request, size = await self._read(content_type, encoding, body)
        answered: asyncio.Future[tuple[int, bytes, Mapping[str, str]]] = asyncio.get_running_loop().create_future()

        def reply(status: int, document: bytes, extra: Mapping[str, str]) -> None:
            if not answered.done():  # else the waiting request was cancelled
                answered.set_result((status, document, extra))

        self.rows.take_request(principal, request, size, received_s, started_s, reply, _kept(headers))
        return await answered

    async def _read(self, content_type: str, encoding: str, body: bytes) -> tuple[Request, int]:
        """Return the decoded request and the size of its decompressed body in bytes."""
        if content_type == ROWS_CONTENT_TYPE:
            if encoding == "deflate":
                body = self._reader.inflated(body)
            return self._reader.read(body), len(body)
        if len(body) <= DECODE_INLINE_BYTES_MAX:
            return read_whole(body), len(body)
        return await asyncio.to_thread(read_whole, body), len(body)


def _kept(headers: Mapping[str, str]) -> int | None:
    """Return how many frames follow those of the request, all acknowledged by another server; None: they are new."""
    said = headers.get(KEPT_HEADER.lower(), "")
    return int(said) if said.isascii() and said.isdecimal() and len(said) <= KEPT_DIGITS_MAX else None


def _content(headers: Mapping[str, str]) -> tuple[str, str]:
    """Return a request's content type and encoding. Raises Refusal for those that are not read."""
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in (CONTENT_TYPE, ROWS_CONTENT_TYPE):
        detail = f"content type {content_type[:80]!r} is not supported; send {ROWS_CONTENT_TYPE} or {CONTENT_TYPE}"
        raise Refusal(415, "content_type", detail)
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity" and not (encoding == "deflate" and content_type == ROWS_CONTENT_TYPE):
        detail = f"content encoding {encoding[:80]!r} is not supported; send none, or deflate with {ROWS_CONTENT_TYPE}"
        raise Refusal(415, "content_encoding", detail)
    return content_type, encoding
