"""POST /api/v1/write: makes the samples of Prometheus remote write 1.0 and 2.0 durable as rows.

A plain ASGI endpoint beside that of the agents. Undecodable requests are refused as a whole. In others, samples that
the sender should not have sent (a node that its token does not cover, labels beyond the limits) are dropped and the
answer is 400, which no sender retries; the rest is kept. Samples of jobs that other cells judge are sent on to them.
Samples that map to no metric are dropped, counted, and reported as written, because Prometheus treats an answer that
nothing was written as a failure.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.ingest.remote_write import snappy, wire
from eagle_eye.server.ingest.remote_write.intake import RefusedSamples, RemoteWriteIntake, Taken, own_cell
from eagle_eye.server.ingest.remote_write.keeper import Keeper, is_ours
from eagle_eye.server.ingest.remote_write.mapping import TARGET_UP
from eagle_eye.server.ingest.remote_write.membership import NodeJobs
from eagle_eye.server.ingest.remote_write.other_cells import OtherCells
from eagle_eye.server.ingest.remote_write.sender_clocks import SenderClocks
from eagle_eye.server.ingest.remote_write.wire import Malformed, WriteRequest
from eagle_eye.server.ingest.settings import IngestSettings, RemoteWriteSettings
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import HistoryBusy, HistoryUnavailable, Refusal, StoreUnavailable
from eagle_eye.server.security.auth import Credentials, Principal, Writer
from eagle_eye.server.telemetry.counters import Telemetry
from eagle_eye.server.transport import methods
from eagle_eye.server.transport.other_servers import OF_ONE_CELL
from eagle_eye.server.transport.raw_http import ASGIMessage, Receive, Send, answer, headers_of, read_body, refuse

PATH = "/api/v1/write"
MEDIA_TYPE = "application/x-protobuf"
V1 = "prometheus.WriteRequest"
V2 = "io.prometheus.write.v2.Request"
# The counts in an answer of version 2.0.
WRITTEN = tuple(f"X-Prometheus-Remote-Write-{what}-Written" for what in ("Samples", "Histograms", "Exemplars"))
DECODING_MAX = 4  # requests decoded concurrently; each may take several times decompressed_bytes_max
WAITING_BYTES_MAX = 128 << 20  # of bodies waiting to be decoded: a thousand of Prometheus' usual size
SERIES_AT_ONCE = 500  # processed without a pause: a few milliseconds, or about twenty if all are new
RETRY_BUSY_S = 1
RETRY_UNAVAILABLE_S = 5
AGENT_FRESH_S = 600.0  # an agent's data for its node takes precedence until it has been silent for this long
NAMED_MAX = 256  # distinct complaints named in the log

_log = logging.getLogger(__name__)


class WriterAuthenticator(Protocol):
    """Identifies the sender; see auth.py."""

    def authenticate(self, credentials: Credentials) -> Principal:
        """Return the principal of the credentials. Raises Refusal 401 or 403."""
        ...

    def authorise_remote_write(self, principal: Principal) -> Writer:
        """Return what the principal may write. Raises Refusal 403."""
        ...


class RemoteWrite:
    """The endpoint. ``admit(principal)`` raises Refusal 503 where requests come too often.

    ``other_cells`` None: every job is this server's.
    """

    def __init__(
        self,
        settings: RemoteWriteSettings,
        ingest: IngestSettings,
        auth: WriterAuthenticator,
        fleet: Fleet,
        intake: RemoteWriteIntake,
        keeper: Keeper,
        membership: NodeJobs,
        wanted: frozenset[bytes],
        telemetry: Telemetry,
        clock: Clock,
        admit: Callable[[Principal], None],
        other_cells: OtherCells | None = None,
    ) -> None:
        self._admit = admit
        self._other_cells = other_cells
        self._settings = settings
        self._ingest = ingest
        self._auth = auth
        self._fleet = fleet
        self._intake = intake
        self._keeper = keeper
        self._membership = membership
        self._wanted = wanted
        self._telemetry = telemetry
        self._clock = clock
        self._decoding = asyncio.Semaphore(DECODING_MAX)
        self._waiting_bytes = 0
        self._senders = SenderClocks()
        self._named: set[str] = set()  # complaints already logged

    async def __call__(self, scope: ASGIMessage, receive: Receive, send: Send) -> None:
        """Answer one request."""
        started_s = self._clock.monotonic_s()
        try:
            counted, written, taken = await self._take(scope, receive)
        except Refusal as refusal:
            self._telemetry.remote_write_rejected.labels(refusal.reason).inc()
            await refuse(send, refusal)
            return
        except StoreUnavailable as error:  # the token cannot be looked up
            self._telemetry.remote_write_rejected.labels("storage").inc()
            await refuse(send, Refusal(503, "storage", str(error), {"Retry-After": str(RETRY_UNAVAILABLE_S)}))
            return
        except Exception:  # noqa: BLE001 - no outer layer answers and counts errors of this endpoint
            _log.exception("a remote write could not be taken for a reason that was not foreseen")
            self._telemetry.remote_write_rejected.labels("internal").inc()
            await refuse(send, Refusal(500, "internal", "the server failed; its log says why"))
            return
        self._telemetry.remote_write_seconds.observe(self._clock.monotonic_s() - started_s)
        self._count(written, taken)
        refused = sum(taken.refused.values())
        headers = _written_headers(written, refused) if counted else {}
        if refused:
            self._name(taken)
            detail = f"{refused} of {written.samples} samples are not taken; the first: {taken.complaint}"[:2000]
            await refuse(send, Refusal(400, next(iter(taken.refused)), detail, headers))
        else:
            await answer(send, 204, "", b"", headers)

    async def _take(self, scope: ASGIMessage, receive: Receive) -> tuple[bool, WriteRequest, Taken]:
        """Return whether the answer says how much was written, what was, and what became of it. Raises Refusal."""
        headers = headers_of(scope)
        if scope["method"] != "POST":
            raise methods.refusal(scope["method"], ["POST"])
        credentials = Credentials.of(scope["method"], headers, scope.get("state", {}), or_basic=True)
        principal = self._auth.authenticate(credentials)
        writer = self._auth.authorise_remote_write(principal)
        self._admit(principal)
        version = _version(headers)
        limit, timeout_s = self._settings.body_bytes_max, self._ingest.body_timeout_s
        body = await read_body(receive, headers, limit, timeout_s, "remote_write.body_bytes_max")
        written = await self._decoded(version, body)
        await self._membership.refresh()
        received_s = self._clock.now_s()
        mapped = any(one.name != TARGET_UP for one in written.series)
        self._fleet.unmapped_senders.note(principal.who, written.unwanted_names, received_s, mapped=mapped)
        sent_on = OF_ONE_CELL.decode() in headers
        # A client's certificate counts on its own connection only.
        other_cells = None if sent_on or credentials.certificate_names else self._other_cells
        cell_of = own_cell if other_cells is None else other_cells.cell_of
        reserved: list[str] = []
        admit, taken = self._admission(principal, writer, received_s, reserved), Taken()
        offset_s = self._senders.offset_s(principal.who, written.series, received_s)
        try:
            for start in range(0, len(written.series), SERIES_AT_ONCE):
                part = written.series[start : start + SERIES_AT_ONCE]
                self._intake.take(part, received_s, admit, taken, offset_s, cell_of)
                await asyncio.sleep(0)  # let the event loop serve others
            await self._keeper.keep(taken.moments)
        except HistoryBusy as error:
            raise Refusal(503, "busy", str(error), {"Retry-After": str(RETRY_BUSY_S)}) from None
        except HistoryUnavailable as error:
            raise Refusal(503, "storage", str(error), {"Retry-After": str(RETRY_UNAVAILABLE_S)}) from None
        finally:
            self._fleet.room.release(reserved)
        if other_cells is not None:
            await other_cells.bring(taken, credentials.authorization)
        return version == V2 or sent_on, written, taken

    async def _decoded(self, version: str, body: bytes) -> WriteRequest:
        """Decode the body in a thread, when its turn comes."""
        if self._waiting_bytes + len(body) > WAITING_BYTES_MAX:
            raise Refusal(
                503,
                "busy",
                f"{self._waiting_bytes} bytes of requests wait to be read, at most {WAITING_BYTES_MAX} may; send again"
                " later, over fewer shards (queue_config)",
                {"Retry-After": str(RETRY_BUSY_S)},
            )
        self._waiting_bytes += len(body)
        try:
            async with self._decoding:
                return await asyncio.to_thread(self._decode, version, body)
        finally:
            self._waiting_bytes -= len(body)

    def _decode(self, version: str, body: bytes) -> WriteRequest:
        limit = self._settings.decompressed_bytes_max
        try:
            announced = snappy.announced_bytes(body)
            if announced > limit:
                raise Refusal(
                    413,
                    "oversized",
                    f"the body announces {announced} bytes; at most {limit} are unpacked"
                    " (remote_write.decompressed_bytes_max): send fewer samples (max_samples_per_send)",
                )
            content = snappy.uncompressed(body, announced)
            read = wire.read_v2 if version == V2 else wire.read_v1
            return read(content, self._wanted, self._settings.request_series_max)
        except snappy.BadSnappy as error:
            raise Refusal(400, "snappy", str(error)) from None
        except Malformed as error:
            raise Refusal(413 if error.reason.endswith("_limit") else 400, error.reason, str(error)) from None

    def _admission(
        self, principal: Principal, writer: Writer, now_s: float, reserved: list[str]
    ) -> Callable[[str], RefusedSamples | None]:
        """Return a function that gives the reason to refuse a node; new unvouched nodes are added to ``reserved``."""
        nodes_max = self._settings.token_nodes_max if writer.nodes_max is None else writer.nodes_max

        def admit(node: str) -> RefusedSamples | None:
            if not writer.may_speak_for(node):
                named = ", ".join(writer.patterns)[:200]
                return RefusedSamples("node", f"the token speaks for {named}; {node!r} is none of them", True)
            own = self._fleet.last(node)
            heard = own if own is not None and not is_ours(own) else self._fleet.agent_of(node)
            if heard is not None and not is_ours(heard) and now_s - heard.received_s <= AGENT_FRESH_S:
                return RefusedSamples("has_agent", "the node's own agent tells of it", False, departs=heard is not own)
            try:
                self._ingest.check_name(node)
                if writer.vouches_for(node):
                    self._fleet.check_room(node)
                    self._fleet.vouchers.note_spoken(node)
                if self._fleet.room.reserve(node, principal.who, nodes_max):
                    reserved.append(node)
            except Refusal as refusal:
                return RefusedSamples(refusal.reason, refusal.detail, True)
            return None

        return admit

    def _count(self, written: WriteRequest, taken: Taken) -> None:
        if written.oversized:
            taken.refuse(
                "labels_limit",
                written.oversized,
                f"the labels of a series have more than {wire.LABEL_BYTES_MAX} bytes",
            )
        count = self._telemetry
        count.remote_write_samples.inc(written.samples)
        for counts in ({"unmapped": written.unwanted}, written.beside, taken.left_out, taken.refused):
            for reason, number in counts.items():
                if number:
                    count.remote_write_left_out.labels(reason).inc(number)
        count.remote_write_series.set(self._intake.series_count)
        for node, moved in taken.moved.items():
            self._fleet.clock_notes.note_moved(node, "sample", moved, self._clock.now_s())
        if taken.left_out["identity"]:
            self._fleet.name_disputes(self._clock.now_s())
        if taken.moments:
            newest_s = max(moment.time_s for moment in taken.moments)
            count.remote_write_lag.set(self._clock.now_s() - newest_s)

    def _name(self, taken: Taken) -> None:
        """Log what a sender should not have sent, each complaint once."""
        if taken.complaint not in self._named and len(self._named) < NAMED_MAX:
            self._named.add(taken.complaint)
            _log.warning("samples of a remote write are not taken", extra={"complaint": taken.complaint[:500]})


def _version(headers: dict[str, str]) -> str:
    kind, *parameters = (part.strip() for part in headers.get("content-type", "").split(";"))
    message = next((value.strip('"') for key, _, value in (p.partition("=") for p in parameters) if key == "proto"), V1)
    if kind.lower() != MEDIA_TYPE or message not in (V1, V2):
        raise Refusal(
            415,
            "content_type",
            f"content type {headers.get('content-type', '')[:120]!r} is not supported; send {MEDIA_TYPE};proto={V1}"
            f" or {MEDIA_TYPE};proto={V2}",
        )
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding != "snappy":
        raise Refusal(415, "content_encoding", f"content encoding {encoding[:80]!r} is not supported; send snappy")
    return message


def _written_headers(written: WriteRequest, refused: int) -> dict[str, str]:
    counts = (written.samples - refused, written.beside["histogram"], written.beside["exemplar"])
    return dict(zip(WRITTEN, map(str, counts), strict=True))
