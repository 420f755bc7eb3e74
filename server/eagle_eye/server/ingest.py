"""POST /api/v1/frames: from an agent's request to durable frames, refused whole or taken whole.

A plain ASGI endpoint in front of the API: it reads bodies with a limit and spends nothing on routing.
Clock correction: a node's offset is estimated from its requests (see Fleet.offset_s); beyond two seconds it is
added to the times of the frames that the detection loop gets. The history keeps the frames as they came, with
the offset beside them.
Late frames (history.LATE_S) are what an agent kept while the server was away and sends after newer ones. They are
kept like all others and are no news: they move neither the fleet nor the loop's view of a node. Of them the loop is
told only what stays true, the facts of ``LASTING``.
What a newer agent sends and this server does not know is left out, counted, and named in the log and in the answer.
The history keeps it: a newer server can read it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from eagle_eye.schema.frame import CONTENT_TYPE, BadFrame, Frame, Rank, decode_request, read_frame, unknown_keys
from eagle_eye.server.auth import Credentials, Principal
from eagle_eye.server.clock import Clock
from eagle_eye.server.config import IngestSettings
from eagle_eye.server.errors import HistoryBusy, HistoryUnavailable, Refusal, StoreUnavailable
from eagle_eye.server.fleet import Fleet, Heard, job_of
from eagle_eye.server.history import Appended, Batch, Entry, History
from eagle_eye.server.raw_http import ASGIMessage, Receive, Send, answer, headers_of, read_body, refuse
from eagle_eye.server.telemetry import Telemetry

PATH = "/api/v1/frames"
FUTURE_S_MAX = 300.0  # how far a frame's time may lie after its sending, both by the node's clock
DECODE_INLINE_BYTES_MAX = 1 << 16  # larger bodies are decoded in a thread: the event loop answers others meanwhile
RETRY_BUSY_S = 1
RETRY_UNAVAILABLE_S = 5
KEYS_EVERY = 64  # frames of a stream, of which one is searched for unknown keys, the first to begin with
UNKNOWN_LOGGED_MAX = 256  # different things that the log names: a hostile agent could make up more for ever
UNKNOWN_ANSWERED_MAX = 32  # that an answer names: an agent reads 64 KiB of it
LATE_AT_ONCE_MAX = 4  # requests of late frames alone at a time: after an outage a whole fleet has an hour to tell

# Events that are as true later: what happened to a device, a process or the node, as against the phase it was in.
LASTING = frozenset(
    {"xid", "sxid", "gpu_lost", "machine_check", "kernel_panic", "oom_kill", "process_exit", "training_error"}
)

_log = logging.getLogger(__name__)


class Authenticator(Protocol):
    """Who is asking; see auth.py."""

    def authenticate(self, credentials: Credentials) -> Principal:
        """Return who it is. Raises Refusal 401 or 403."""
        ...

    def authorise_frames(self, principal: Principal, node: str) -> None:
        """Return if the principal may send the node's frames. Raises Refusal 403."""
        ...


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
    ) -> None:
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
        self._named: set[str] = set()  # unknown things that the log has told of
        self._late_now = 0  # requests of late frames that are being kept

    async def __call__(self, scope: ASGIMessage, receive: Receive, send: Send) -> None:
        """Answer one request."""
        started_s = self._clock.monotonic_s()
        try:
            appended, size, asked, unknown = await self._take(scope, receive)
        except Refusal as refusal:
            self._telemetry.rejected.labels(refusal.reason).inc()
            await refuse(send, refusal)
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

    async def _take(self, scope: ASGIMessage, receive: Receive) -> _Taken:
        headers = headers_of(scope)
        if scope["method"] != "POST":
            raise Refusal(405, "method", f"{PATH} takes POST, not {scope['method'][:20]}", {"Allow": "POST"})
        principal = self._auth.authenticate(Credentials.of(scope["method"], headers, scope.get("state", {})))
        self._admit(principal)
        _check_headers(headers)
        limit, timeout_s = self._settings.body_bytes_max, self._settings.body_timeout_s
        body = await read_body(receive, headers, limit, timeout_s, "ingest.body_bytes_max")
        received_s = self._clock.now_s()
        if len(body) <= DECODE_INLINE_BYTES_MAX:
            request = _decode(body)
        else:
            request = await asyncio.to_thread(_decode, body)
        self._check_sender(principal, request)
        if all(self._fleet.is_late(frame, request.sent_s) for frame in request.frames):
            appended = await self._keep_late(request, received_s)
        else:
            appended = await self._keep(request, received_s)
        unknown = self._note_unknown(request) if request.unknown else []
        return _Taken(appended, len(body), self._asked_of(request.frames[0].node), unknown)

    def _note_unknown(self, request: _Request) -> list[str]:
        """Count what was left out of the frames, say what is new of it, and return its names."""
        for name, times in request.unknown.items():
            self._telemetry.unknown.labels(name.partition(" ")[0]).inc(times)
        newest = request.frames[-1]
        for name in request.unknown.keys() - self._named:
            if len(self._named) < UNKNOWN_LOGGED_MAX:
                self._named.add(name)
                said = "node %s (agent %r) sends what this server does not know and leaves out, upgrade the server: %s"
                _log.warning(said, newest.node, newest.agent_version[:80], name)
        return sorted(request.unknown)[:UNKNOWN_ANSWERED_MAX]

    def _check_sender(self, principal: Principal, request: _Request) -> None:
        node = request.frames[0].node
        self._auth.authorise_frames(principal, node)
        self._settings.check_name(node)
        self._fleet.check_room(node)

    async def _keep_late(self, request: _Request, received_s: float) -> Appended:
        """Keep frames that can wait: few at a time, so that they delay no others."""
        if self._late_now >= LATE_AT_ONCE_MAX:
            detail = (
                f"{LATE_AT_ONCE_MAX} requests of old frames are being kept, the most at a time; send this one later"
            )
            raise Refusal(503, "busy", detail, {"Retry-After": str(RETRY_BUSY_S)})
        self._late_now += 1
        try:
            return await self._keep(request, received_s)
        finally:
            self._late_now -= 1

    async def _keep(self, request: _Request, received_s: float) -> Appended:
        first = request.frames[0]
        offset_s = self._fleet.offset_s(first.node, request.sent_s, received_s)
        entries = tuple(
            Entry(frame.sequence, frame.time_s, raw) for frame, raw in zip(request.frames, request.raw, strict=True)
        )
        try:
            future = self._history.submit(Batch(first.node, first.stream, received_s, offset_s, entries))
            appended = await asyncio.wrap_future(future)
        except HistoryBusy as error:
            raise Refusal(503, "busy", str(error), {"Retry-After": str(RETRY_BUSY_S)}) from None
        except HistoryUnavailable as error:
            raise Refusal(503, "storage", str(error), {"Retry-After": str(RETRY_UNAVAILABLE_S)}) from None
        for frame, new in zip(request.frames, appended.new, strict=True):
            if new and self._fleet.is_late(frame, request.sent_s):
                self._telemetry.late.inc()
                self._observe_late(frame, offset_s)
            elif new:
                if self._fleet.heard(frame, received_s):
                    await self._introduce(frame.node)
                self._observe(corrected(frame, offset_s), received_s, offset_s)
        return appended

    def _observe_late(self, frame: Frame, offset_s: float) -> None:
        newest = self._fleet.last(frame.node)
        told = belated(frame, newest) if newest is not None else None
        if newest is not None and told is not None:
            self._observe(corrected(told, offset_s), newest.received_s, offset_s)

    async def _introduce(self, node: str) -> None:
        try:
            await self._found(node)
        except StoreUnavailable:
            # The frames are durable and must be acknowledged; /readyz tells of the store, and the node is
            # written down at the next start.
            _log.warning("a node could not be written down", extra={"node": node})
            self._telemetry.failures.labels("node").inc()


def belated(frame: Frame, newest: Heard) -> Frame | None:
    """Return what the loop is told of a late frame: its lasting facts, as if the node's newest frame had told them.

    None: nothing. A fact that does not say itself which attempt it is of counts only while the same attempts run.
    """
    same = job_of(frame) == newest.job and _attempts(frame.ranks) == _attempts(newest.ranks)
    events = [event for event in frame.events if event.kind in LASTING and (same or "attempt" in event.attributes)]
    if not events or newest.farewell:
        return None
    standing = {"job": newest.job, "ranks": list(newest.ranks), "collectors": dict(newest.collectors)}
    return msgspec.structs.replace(frame, **standing, blocks=[], events=events)


def _attempts(ranks: Sequence[Rank]) -> set[tuple[str, int]]:
    return {(rank.job, rank.attempt) for rank in ranks}


def corrected(frame: Frame, offset_s: float) -> Frame:
    """Return the frame with its times and its events' times moved by ``offset_s``."""
    if offset_s == 0.0:
        return frame
    replace = msgspec.structs.replace
    events = [replace(event, time_s=event.time_s + offset_s) for event in frame.events]
    return replace(frame, time_s=frame.time_s + offset_s, events=events)


def _check_headers(headers: dict[str, str]) -> None:
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != CONTENT_TYPE:
        raise Refusal(415, "content_type", f"content type {content_type[:80]!r} is not read; send {CONTENT_TYPE}")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise Refusal(415, "content_encoding", f"content encoding {encoding[:80]!r} is not read; send none")


def _decode(body: bytes) -> _Request:
    try:
        sent_s, raws = decode_request(body)
    except BadFrame as error:
        raise _bad(error, "the request") from None
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
            raise _bad(error, f"frame {index}") from None
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise Refusal(400, "malformed", f"frame {index} cannot be decoded: {type(error).__name__}") from None
        if frame.time_s > sent_s + FUTURE_S_MAX:
            raise Refusal(
                400,
                "time",
                f"frame {index} is dated {frame.time_s - sent_s:.0f} s after its sending; at most"
                f" {FUTURE_S_MAX:.0f} s are believed. Drop it: the node's clock was set back since",
            )
        if (frame.node, frame.stream) != (frames[0].node, frames[0].stream) if frames else False:
            raise Refusal(400, "mixed", f"frame {index} is of another node or stream than frame 0; send one a request")
        frames.append(frame)
    return _Request(sent_s, tuple(frames), tuple(raws), unknown)


def _bad(error: BadFrame, where: str) -> Refusal:
    return Refusal(413 if error.reason == "oversized" else 400, error.reason, f"{where}: {error}"[:2000])
