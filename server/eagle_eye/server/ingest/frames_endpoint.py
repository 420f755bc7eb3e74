"""POST /api/v1/frames: from an agent's request to durable frames, refused whole or taken whole.

A plain ASGI endpoint in front of the API: it reads bodies with a limit and spends nothing on routing.
Clock correction: a node's offset is estimated from its requests (see NodeClock); beyond two seconds it is
added to the times of the frames that the detection loop gets. The history keeps the frames as they came, with
the offset beside them. Times that cannot be, after their receipt or a decade old, are moved: none is refused, as an
agent would have to drop what it says.
Late frames (history.LATE_S) are what an agent kept while the server was away and sends after newer ones. They are
kept like all others and are no news: they move neither the fleet nor the loop's view of a node. Of them the loop is
told only what stays true, the facts of ``frame_rules.LASTING``.
Frames come whole, as version 1 of the wire has them, or as rows, version 2, which ``rows_ingest`` takes.
What a newer agent sends and this server does not know is left out, counted, and named in the log and in the answer.
The history keeps it: a newer server can read it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from eagle_eye.schema.frame import CONTENT_TYPE, BadFrame, Frame, decode_request, read_frame, unknown_keys
from eagle_eye.schema.problem import CONTENT_TYPE as PROBLEM_TYPE
from eagle_eye.schema.rows import CONTENT_TYPE as ROWS_CONTENT_TYPE
from eagle_eye.server.history.history import Appended, Batch, Entry, History
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.ingest.frame_rules import (
    KEYS_EVERY,
    LATE_AT_ONCE_MAX,
    RETRY_BUSY_S,
    RETRY_UNAVAILABLE_S,
    Authenticator,
    belated,
    refusal_of,
)
from eagle_eye.server.ingest.rows_ingest import RowsIngest
from eagle_eye.server.ingest.settings import IngestSettings
from eagle_eye.server.ingest.unknown_fields import UnknownThings
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import HistoryBusy, HistoryUnavailable, Refusal, StoreUnavailable
from eagle_eye.server.security.auth import Credentials, Principal
from eagle_eye.server.telemetry.counters import Telemetry
from eagle_eye.server.transport import methods
from eagle_eye.server.transport.raw_http import ASGIMessage, Receive, Send, answer, headers_of, read_body, refuse

PATH = "/api/v1/frames"
DECODE_INLINE_BYTES_MAX = 1 << 16  # larger bodies are decoded in a thread: the event loop answers others meanwhile

_log = logging.getLogger(__name__)


class _Taken(NamedTuple):
    appended: Appended
    size: int  # of the body, in bytes
    asked: list[dict[str, Any]]
    unknown: list[str]


class _Request(NamedTuple):
    sent_s: float
    frames: tuple[Frame, ...]
    raw: tuple[bytes, ...]
    unknown: Counter[str]


class _Placed(NamedTuple):
    """Where a request's times are; ``moved_s``, of each frame, is added beside ``offset_s``."""

    received_s: float
    offset_s: float
    moved_s: Sequence[float]


class Ingest:
    """The endpoint. ``observe(frame, received_s, offset_s)`` gets each new frame once it is durable;
    ``found(node)`` is awaited before that for each node that was never heard of. ``asked_of(node)`` returns what the
    node's agent is asked for with the answer. ``admit(principal)`` raises Refusal 429 where requests come too often.
    """  # noqa: D205 - one thought

    def __init__(
        self,
        settings: IngestSettings,
        history: History,
        fleet: Fleet,
        auth: Authenticator,
        telemetry: Telemetry,
        clock: Clock,
        observe: Callable[[Frame, float, float], None],
        found: Callable[[str], Awaitable[None]],
        asked_of: Callable[[str], list[dict[str, Any]]] = lambda _node: [],
        admit: Callable[[Principal], None] = lambda _principal: None,
        *,
        rows: RowsIngest,
        inflated: Callable[[bytes], bytes],
        unknown: UnknownThings,
    ) -> None:
        self.rows = rows
        self._inflated = inflated
        self._unknown = unknown
        self._settings = settings
        self._history = history
        self._fleet = fleet
        self._auth = auth
        self._telemetry = telemetry
        self._clock = clock
        self._observe = observe
        self._found = found
        self._asked_of = asked_of
        self._admit = admit
        self._late_now = 0  # requests of late frames that are being kept

    async def __call__(self, scope: ASGIMessage, receive: Receive, send: Send) -> None:
        """Answer one request."""
        started_s = self._clock.monotonic_s()
        try:
            headers = headers_of(scope)
            principal, body = await self._admitted(scope, headers, receive)
            if _is_of_rows(headers):
                await self._take_rows(principal, headers, body, started_s, send)
                return
            appended, size, asked, unknown = await self._take(principal, body)
        except Refusal as refusal:
            self._telemetry.rejected.labels(refusal.reason).inc()
            await refuse(send, refusal)
            return
        except StoreUnavailable as error:  # whose token it is cannot be looked up, or what is asked of the node
            self._telemetry.rejected.labels("storage").inc()
            await refuse(send, Refusal(503, "storage", str(error), {"Retry-After": str(RETRY_UNAVAILABLE_S)}))
            return
        except Exception:  # noqa: BLE001 - nothing stands behind this endpoint that would answer and count it
            _log.exception("frames could not be taken for a reason that was not foreseen")
            self._telemetry.rejected.labels("internal").inc()
            await refuse(send, Refusal(500, "internal", "the server failed; its log says why"))
            return
        self._telemetry.frames.inc(appended.accepted)
        self._telemetry.duplicates.inc(appended.duplicates)
        self._telemetry.bytes.inc(size)
        self._telemetry.ingest_seconds.observe(self._clock.monotonic_s() - started_s)
        said: dict[str, Any] = {
            "accepted": appended.accepted,
            "duplicates": appended.duplicates,
            "watermark": appended.watermark,
        }
        if asked:
            said["requests"] = asked
        if unknown:
            said["unknown"] = unknown
        await answer(send, 200, "application/json", msgspec.json.encode(said))

    async def _admitted(self, scope: ASGIMessage, headers: dict[str, str], receive: Receive) -> tuple[Principal, bytes]:
        """Return who sends what. Raises Refusal."""
        if scope["method"] != "POST":
            raise methods.refusal(scope["method"], ["POST"])
        principal = self._auth.authenticate(Credentials.of(scope["method"], headers, scope.get("state", {})))
        self._admit(principal)
        _check_headers(headers)
        limit, timeout_s = self._settings.body_bytes_max, self._settings.body_timeout_s
        return principal, await read_body(receive, headers, limit, timeout_s, "ingest.body_bytes_max")

    async def _take_rows(
        self, principal: Principal, headers: dict[str, str], body: bytes, started_s: float, send: Send
    ) -> None:
        answered: asyncio.Future[tuple[int, bytes, Mapping[str, str]]] = asyncio.get_running_loop().create_future()
        if headers.get("content-encoding", "identity").strip().lower() == "deflate":
            body = self._inflated(body)

        def reply(status: int, document: bytes, extra: Mapping[str, str]) -> None:
            if not answered.done():  # else whoever waited has gone
                answered.set_result((status, document, extra))

        self.rows.take(principal, body, started_s, reply)
        status, document, extra = await answered
        await answer(send, status, "application/json" if status == 200 else PROBLEM_TYPE, document, extra)

    async def _take(self, principal: Principal, body: bytes) -> _Taken:
        received_s = self._clock.now_s()
        if len(body) <= DECODE_INLINE_BYTES_MAX:
            request = _decode(body)
        else:
            request = await asyncio.to_thread(_decode, body)
        self._check_sender(principal, request)
        placed = self._placed(request, received_s)
        if all(self._fleet.is_late(frame, request.sent_s, by_s) for frame, by_s in _moved(request, placed)):
            appended = await self._keep_late(request, placed)
        else:
            appended = await self._keep(request, placed)
        unknown = self._note_unknown(request) if request.unknown else []
        return _Taken(appended, len(body), self._asked_of(request.frames[0].node), unknown)

    def _note_unknown(self, request: _Request) -> list[str]:
        newest = request.frames[-1]
        return self._unknown.note(newest.node, newest.agent_version, request.unknown)

    def _check_sender(self, principal: Principal, request: _Request) -> None:
        node = request.frames[0].node
        self._auth.authorise_frames(principal, node)
        self._settings.check_name(node)
        self._fleet.check_room(node)

    def _placed(self, request: _Request, received_s: float) -> _Placed:
        """Return where the request's times are by the server's clock."""
        node, times_s = request.frames[0].node, [frame.time_s for frame in request.frames]
        base_s = request.frames[-1].base_s
        offset_s = self._fleet.offset_s(node, request.sent_s, received_s, max(times_s), base_s)
        moved_s = self._fleet.moved_s(node, times_s, received_s)
        return _Placed(received_s, offset_s, moved_s or [0.0] * len(times_s))

    async def _keep_late(self, request: _Request, placed: _Placed) -> Appended:
        """Keep frames that can wait: few at a time, so that they delay no others."""
        if self._late_now >= LATE_AT_ONCE_MAX:
            detail = (
                f"{LATE_AT_ONCE_MAX} requests of old frames are being kept, the most at a time; send this one later"
            )
            raise Refusal(503, "busy", detail, {"Retry-After": str(RETRY_BUSY_S)})
        self._late_now += 1
        try:
            return await self._keep(request, placed)
        finally:
            self._late_now -= 1

    async def _keep(self, request: _Request, placed: _Placed) -> Appended:
        first, received_s, offset_s = request.frames[0], placed.received_s, placed.offset_s
        entries = tuple(
            Entry(frame.sequence, frame.time_s, raw, by_s)
            for (frame, by_s), raw in zip(_moved(request, placed), request.raw, strict=True)
        )
        try:
            future = self._history.submit(Batch(first.node, first.stream, received_s, offset_s, entries))
            appended = await asyncio.wrap_future(future)
        except HistoryBusy as error:
            raise Refusal(503, "busy", str(error), {"Retry-After": str(RETRY_BUSY_S)}) from None
        except HistoryUnavailable as error:
            raise Refusal(503, "storage", str(error), {"Retry-After": str(RETRY_UNAVAILABLE_S)}) from None
        for (frame, by_s), new in zip(_moved(request, placed), appended.new, strict=True):
            if new and self._fleet.is_late(frame, request.sent_s, by_s):
                self._telemetry.late.inc()
                self._observe_late(frame, offset_s + by_s, received_s)
            elif new:
                if self._fleet.heard(frame, received_s, by_s):
                    await self._introduce(frame.node)
                self._observe(self._fleet.dated(frame, offset_s + by_s, received_s), received_s, offset_s)
        return appended

    def _observe_late(self, frame: Frame, offset_s: float, received_s: float) -> None:
        newest = self._fleet.last(frame.node)
        told = belated(frame, newest) if newest is not None else None
        if newest is not None and told is not None:
            self._observe(self._fleet.dated(told, offset_s, received_s), newest.received_s, offset_s)

    async def _introduce(self, node: str) -> None:
        try:
            await self._found(node)
        except StoreUnavailable:
            # The frames are durable and must be acknowledged; /readyz tells of the store, and the node is
            # written down at the next start.
            _log.warning("a node could not be written down", extra={"node": node})
            self._telemetry.failures.labels("node").inc()


def _is_of_rows(headers: Mapping[str, str]) -> bool:
    return headers.get("content-type", "").partition(";")[0].strip().lower() == ROWS_CONTENT_TYPE


def _check_headers(headers: Mapping[str, str]) -> None:
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in (CONTENT_TYPE, ROWS_CONTENT_TYPE):
        detail = f"content type {content_type[:80]!r} is not read; send {ROWS_CONTENT_TYPE} or {CONTENT_TYPE}"
        raise Refusal(415, "content_type", detail)
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity" and not (encoding == "deflate" and content_type == ROWS_CONTENT_TYPE):
        detail = f"content encoding {encoding[:80]!r} is not read; send none, or deflate with {ROWS_CONTENT_TYPE}"
        raise Refusal(415, "content_encoding", detail)


def _moved(request: _Request, placed: _Placed) -> Iterable[tuple[Frame, float]]:
    """Return the request's frames with what is added to each beside the offset."""
    return zip(request.frames, placed.moved_s, strict=True)


def _decode(body: bytes) -> _Request:
    try:
        sent_s, raws = decode_request(body)
    except BadFrame as error:
        raise refusal_of(error, "the request") from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Refusal(400, "malformed", f"the request cannot be decoded: {type(error).__name__}") from None
    if not raws:
        raise Refusal(400, "empty", "the request has no frames; send at least one")
    frames: list[Frame] = []
    unknown: Counter[str] = Counter()
    for index, raw in enumerate(raws):
        try:
            frame, left_out = read_frame(raw)
            unknown.update(left_out)
            if frame.sequence % KEYS_EVERY == 1:
                unknown.update(unknown_keys(raw))
        except BadFrame as error:
            raise refusal_of(error, f"frame {index}") from None
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise Refusal(400, "malformed", f"frame {index} cannot be decoded: {type(error).__name__}") from None
        if (frame.node, frame.stream) != (frames[0].node, frames[0].stream) if frames else False:
            raise Refusal(400, "mixed", f"frame {index} is of another node or stream than frame 0; send one a request")
        frames.append(frame)
    return _Request(sent_s, tuple(frames), tuple(raws), unknown)
