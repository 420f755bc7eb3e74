"""POST /api/v1/frames: makes agents' frames durable; each request is accepted or refused as a whole.

Group commit: requests gather until the journal has finished the previous group, and for at least a moment, and are
answered with their group: ten thousand agents a second cost a few dozen transactions, and no future, task or lock per
request.

Clock correction: a node's offset is estimated from its requests (see NodeClock); beyond two seconds it is added to the
times that the detection loop gets. The history keeps frames as received, with the offset beside them. Implausible times
(later than their receipt, or a decade old) are moved rather than refused: a refused agent would have to drop its data.

Late frames (history.LATE_S) are those that an agent buffered while the server was away and sends after newer ones. They
are stored like all others, but update neither the fleet nor the detection loop's view of a node. The loop gets only the
events that stay true, ``decoding.LASTING``. So are those that another server has acknowledged before (``Resends``),
which the detection loop reads from the journal once they are whole, and the accounts have counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, count, islice
from typing import Any, TypeVar

import msgspec

from eagle_eye.schema.frame import CONTENT_TYPE, KEPT_HEADER, Frame
from eagle_eye.schema.problem import CELL_LEADER_HEADER, LEADER_HEADER
from eagle_eye.schema.problem import CONTENT_TYPE as PROBLEM_TYPE
from eagle_eye.schema.rows import CONTENT_TYPE as ROWS_CONTENT_TYPE
from eagle_eye.server.history.history import LATE_S, Appended, History
from eagle_eye.server.ingest.decoding import (
    KEPT_DIGITS_MAX,
    LATE_AT_ONCE_MAX,
    RESENT_AT_ONCE_MAX,
    RETRY_BUSY_S,
    RETRY_UNAVAILABLE_S,
    TEMPLATE_ID,
    Asker,
    Authenticator,
    Request,
    RowsReader,
    Usual,
    belated,
    read_single_rows,
    read_whole,
)
from eagle_eye.server.ingest.fleet import BOOT_ID, RESEND_EVERY_S_MIN, Fleet, Resends
from eagle_eye.server.ingest.settings import IngestSettings
from eagle_eye.server.model.batch import Batch, Row, batches_of
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import NO_HEADERS, HistoryBusy, HistoryUnavailable, Refusal, StoreUnavailable
from eagle_eye.server.security.auth import Credentials, Principal
from eagle_eye.server.telemetry.counters import Telemetry
from eagle_eye.server.transport import raw_http
from eagle_eye.server.transport.raw_http import ASGIMessage, Receive, Send, answer, headers_of, read_body, refuse

GATHER_S = 0.005  # how long the first request of a group waits for others
GROUP_EVERY_S = 0.08  # minimum time between large groups: no acknowledgement waits longer for its group to begin...
GROUP_EVERY_S_OF_CELLS, GROUP_ROWS = 0.2, 300  # ...but so long for so many rows where several cells share the load
GROUP_OF_MANY = 32  # rows; smaller groups are written at once
GROUP_ROWS_MAX = 8_192

NEW_NODES_AWAITED = 64
RETRY_ELSEWHERE_S = 1  # a cell's next leader is found within seconds

# Agents tick at the same multiples of their interval; large fleets are asked to spread their requests.
CROWD_S = 60e-6  # approximate cost of one agent's request
CROWD_S_MIN = 0.03
SPREAD_RATIO = 0.8  # of the interval

# Called with the answer: status, body, headers.
Reply = Callable[[int, bytes, Mapping[str, str]], None]

RequestT = TypeVar("RequestT", "_Taken", Usual)

_log = logging.getLogger(__name__)


class _Taken(msgspec.Struct, frozen=True, gc=False):
    """One request in progress."""

    request: Request
    unknown: Sequence[str]
    received_s: float
    offset_s: float
    moved_s: Sequence[float]  # added to each entry's time, beside the offset
    late: tuple[bool, ...]
    size: int
    started_s: float
    reply: Reply
    kept: int | None  # how many follow of those that another server has acknowledged; None: these are new


def group_every_s(rows: int, took_s: float, *, several: bool) -> float:
    """Return how long after a group of ``rows``, which came in ``took_s``, the next begins at the earliest.

    Each group costs a commit. 0 after a small one; of ``several`` cells each has a part of the fleet, and waits for
    GROUP_ROWS, so that a few cells cost hardly more than one.
    """
    if rows < GROUP_OF_MANY:
        return 0.0
    most_s = GROUP_EVERY_S_OF_CELLS if several else GROUP_EVERY_S
    return min(max(GROUP_ROWS * took_s / rows, GROUP_EVERY_S), most_s)


@dataclass(frozen=True, slots=True)
class FrameSinks:
    """Where frames go: ``history`` makes them durable, then the others see them.

    ``observe_rows`` gets plain rows; ``observe(frame, received_s, offset_s)`` gets frames with anything else,
    ``observe_again`` those that another server has taken before, whose requests ``resends`` counts.
    """

    history: History
    observe_rows: Callable[[Sequence[Batch]], None]
    observe: Callable[[Frame, float, float], None]
    observe_again: Callable[[Frame, float, float], None]
    resends: Resends


@dataclass(frozen=True, slots=True)
class AgentAnswers:
    """What agents' answers carry, and what they wait for.

    ``asked_of(node)`` returns the requests that the answer passes to the node's agent; ``has_requests()`` says whether
    there are any. ``found(nodes)`` is awaited for new nodes before their rows are acknowledged, or after that if more
    than NEW_NODES_AWAITED nodes are new at once. ``elsewhere`` are nodes to send to another cell, with the URL of its
    leader, "" for none; each is told once. ``several`` says whether there are several cells, so that this one has a
    part of the fleet.
    """

    found: Callable[[list[str]], Awaitable[None]]
    asked_of: Callable[[str], list[dict[str, Any]]]
    has_requests: Callable[[], bool]
    elsewhere: dict[str, str] = field(default_factory=dict)
    several: Callable[[], bool] = bool


class RowsIngest:
    """Takes agents' requests."""

    def __init__(
        self,
        settings: IngestSettings,
        auth: Authenticator,
        telemetry: Telemetry,
        clock: Clock,
        reader: RowsReader,
        fleet: Fleet,
        sinks: FrameSinks,
        answers: AgentAnswers,
    ) -> None:
        self._settings = settings
        self._auth = auth
        self._telemetry = telemetry
        self._clock = clock
        self._reader = reader
        self._unknown = reader.unknown
        self._fleet = fleet
        self._history = sinks.history
        self._journal = b',"journal":"%b"' % sinks.history.id.encode()
        self._observe_rows = sinks.observe_rows
        self._observe = sinks.observe
        self._observe_again = sinks.observe_again
        self._resends = sinks.resends
        self._found = answers.found
        self._asked_of = answers.asked_of
        self._has_requests = answers.has_requests
        self._elsewhere = answers.elsewhere
        self._several = answers.several
        self._gathered: list[_Taken] = []
        self._usual: list[Usual] = []
        self._rows = self._bytes = 0  # of what has gathered
        self._every_s = 0.0  # from the beginning of the previous group to that of the next
        self._writing = 0
        self._late_now = {False: 0, True: 0}  # requests of old frames alone, and of those that were resent
        self._begun_s = float("-inf")
        self._due: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def take_rows(self, principal: Principal, body: bytes, started_s: float, reply: Reply) -> None:
        """Decode and take the body of a request of rows; see ``take_request``. Raises Refusal."""
        received_s = self._clock.now_s()
        self.take_request(principal, self._reader.read(body), len(body), received_s, started_s, reply)

    def take_request(
        self,
        principal: Principal,
        request: Request,
        size: int,
        now_s: float,
        started_s: float,
        reply: Reply,
        kept: int | None = None,
    ) -> None:
        """Take a request of ``size`` bytes received at ``now_s``; call ``reply`` once it is durable or has failed.

        ``kept``: how many frames follow of those that another server acknowledged before; None: the request's are new.

        On the event loop. Raises Refusal at once for what cannot be taken; ``reply`` is not called then.
        """
        node, entries, sent_s = request.node, request.entries, request.sent_s
        self._auth.authorise_frames(principal, node)
        if node in self._elsewhere:
            raise self._directed(node)
        alone = request.known[0]
        if alone is None or not alone.admitted:
            self._settings.check_name(node)
            self._fleet.check_room(node)
        self._check_room(size)
        times_s = [entry.time_s for entry in entries]
        self._check_machine(request, now_s, live=kept is None and sent_s - max(times_s) <= LATE_S)
        offset_s = self._fleet.offset_s(node, sent_s, now_s, max(times_s), request.clock_base_s)
        moved_s = self._fleet.moved_s(node, times_s, now_s) or [0.0] * len(times_s)
        resent = kept is not None
        late = tuple(
            [
                self._fleet.is_time_late(node, at_s + by_s, sent_s, resent)
                for at_s, by_s in zip(times_s, moved_s, strict=True)
            ]
        )
        if False not in late:
            most = RESENT_AT_ONCE_MAX if resent else LATE_AT_ONCE_MAX
            if self._late_now[resent] >= most:
                detail = f"{most} requests of old frames are being kept, the most at a time; send this one later"
                raise Refusal(503, "busy", detail, {"Retry-After": str(RETRY_BUSY_S)})
            self._late_now[resent] += 1
        unknown = self._unknown.count_ignored(node, request.agent_version, request.unknown) if request.unknown else ()
        self._gathered.append(_Taken(request, unknown, now_s, offset_s, moved_s, late, size, started_s, reply, kept))
        self._gather(len(entries), size)

    def take_if_usual(self, principal: Principal, body: bytes, started_s: float, asker: Asker) -> bool:
        """Take a body that is a single row of a known template, to be decoded in bulk; return False if it is not one.

        On the event loop. ``asker`` is answered once, when the row is durable or has failed. Raises Refusal at once for
        what cannot be taken.
        """
        known = self._reader.alone(body[TEMPLATE_ID], len(body))
        if known is None:
            return False
        self._auth.authorise_frames(principal, known.node)
        if known.node in self._elsewhere:
            raise self._directed(known.node)
        self._check_room(len(body))
        self._usual.append(Usual(known, principal, body, started_s, asker))
        self._gather(1, len(body))
        return True

    def _check_machine(self, request: Request, now_s: float, *, live: bool) -> None:
        """Raise Refusal 403 where another machine than the sender holds the node's name.

        What was sent late may be of an earlier boot of either.
        """
        node, boot_id, fleet = request.node, request.boot_id, self._fleet
        if live:
            holds = fleet.holds_name(node, boot_id, now_s, request.interval_s)
        else:
            holds = not fleet.claims.is_rival(node, BOOT_ID, boot_id)
        if not holds:
            fleet.name_disputes(now_s)
            raise Refusal(
                403,
                "identity",
                f"another machine reports as {node!r} and was there first; this one (boot id {boot_id}) needs a name"
                " and a token of its own. If it took the other's place, it is taken as soon as that one is silent",
            )

    def _directed(self, node: str) -> Refusal:
        """Return what sends the node's agent to the cell that judges its job, as a standby's answer does."""
        url = self._elsewhere.pop(node)
        where = f"at {url}" if url else "which has no leader at present"
        headers = {
            "Retry-After": str(RETRY_ELSEWHERE_S),
            **({LEADER_HEADER: url, CELL_LEADER_HEADER: url} if url else {}),
        }
        return Refusal(503, "standby", f"the job of {node} is judged by another cell, {where}: send there", headers)

    def _check_room(self, size: int) -> None:
        if self._bytes + size > self._settings.pending_bytes_max:
            detail = (
                f"{self._bytes} bytes of rows wait, at most {self._settings.pending_bytes_max} may; send again later"
                " (ingest.pending_bytes_max)"
            )
            raise Refusal(503, "busy", detail, {"Retry-After": str(RETRY_BUSY_S)})

    def _gather(self, rows: int, size: int) -> None:
        """Count what was added to the gathered; begin with it at once where it is a full group, soon otherwise."""
        self._rows += rows
        self._bytes += size
        if self._rows >= GROUP_ROWS_MAX:
            self._begin()
        elif self._due is None and self._writing == 0:
            self._begin_soon(GATHER_S)

    def _begin_soon(self, gather_s: float) -> None:
        since_s = max(self._clock.monotonic_s() - self._begun_s, 0.0)  # a clock that goes back delays nobody
        wait_s = max(gather_s, self._every_s - since_s)
        self._due = asyncio.get_running_loop().call_later(wait_s, self._begin)

    def _begin(self) -> None:
        """Submit the gathered requests to the history."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        now_s = self._clock.monotonic_s()
        took_s = max(now_s - self._begun_s, GATHER_S)
        self._every_s = group_every_s(self._rows, took_s, several=self._several())
        self._begun_s = now_s
        usual, self._usual = self._usual, []
        if usual:
            found, odd = read_single_rows(usual, self._fleet, self._clock.now_s() - self._begun_s)
            for requests, batch in found:
                self._write(batch, requests, partial(self._rows_written, batch))
            for one in odd:
                try:
                    self.take_rows(one.principal, one.body, one.started_s, one.asker.answer)
                except Exception as error:  # noqa: BLE001 - the waiting client must be answered
                    one.asker.refuse(error)
        taken, self._gathered = self._gathered, []
        self._rows = self._bytes = 0
        if taken:
            self._write(_batch(taken), taken, self._written)

    def _write(
        self,
        batch: Batch,
        requests: Sequence[RequestT],
        written: Callable[[Sequence[RequestT], Future[Appended]], None],
    ) -> None:
        """Submit a batch to the history; ``written(requests, future)`` is called once it is durable or has failed."""
        loop = asyncio.get_running_loop()
        try:
            future = self._history.submit(batch)
        except HistoryBusy as error:
            self._refuse(requests, Refusal(503, "busy", str(error), {"Retry-After": str(RETRY_BUSY_S)}))
        except HistoryUnavailable as error:
            self._refuse(requests, _unavailable(error))
        else:
            self._writing += 1
            future.add_done_callback(partial(_on, loop, partial(written, requests)))

    def _outcome(self, requests: Sequence[_Taken] | Sequence[Usual], done: Future[Appended]) -> Appended | None:
        """Return the result of a group; None if it failed and was refused."""
        self._writing -= 1
        if (self._gathered or self._usual) and self._due is None:
            self._begin_soon(0.0)
        try:
            return done.result()
        except HistoryUnavailable as error:
            self._refuse(requests, _unavailable(error))
        except Exception:  # noqa: BLE001 - the waiting clients must be answered
            _log.exception("rows could not be kept for a reason that was not foreseen")
            self._refuse(requests, Refusal(500, "internal", "the server failed; its log says why"))
        return None

    def _rows_written(self, batch: Batch, taken: Sequence[Usual], done: Future[Appended]) -> None:
        appended = self._outcome(taken, done)
        if appended is None:
            return
        news = batch.only(appended.new)
        if news.resolved:
            self._fleet.heard_rows(news.resolved, news.time_s.tolist(), news.received_s.tolist())
            self._observe_rows([news])
        ends: dict[float, bytes] = {}
        requests = self._requests([one.known.node for one in taken])
        for one, asked, new, watermark in zip(taken, requests, appended.new, appended.watermarks, strict=True):
            interval_s = one.known.interval_s
            end = ends.get(interval_s)
            if end is None:
                end = ends[interval_s] = self._ending(interval_s)
            one.asker.accept(
                b'{"accepted":%d,"duplicates":%d,"watermark":%d%b%b}' % (new, not new, watermark, asked, end)
            )
        self._count(sum(appended.new), len(appended.new), batch.raw_bytes, [one.started_s for one in taken])

    def _written(self, taken: Sequence[_Taken], done: Future[Appended]) -> None:
        appended = self._outcome(taken, done)
        if appended is None:
            return
        new_nodes = self._show(taken, iter(appended.new))
        answers = _answers(taken, appended)
        if not new_nodes or len(new_nodes) > NEW_NODES_AWAITED:
            self._acknowledge(answers)
            answers = []
        if new_nodes:
            task = asyncio.get_running_loop().create_task(self._introduce(new_nodes, answers))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _show(self, taken: Sequence[_Taken], new: Iterator[bool]) -> list[str]:
        """Pass new frames to the fleet and detection; return the nodes that were never heard of before."""
        rows: list[Row] = []
        new_nodes: list[str] = []
        for one in taken:
            for template in one.request.fresh:
                template.durable = template.admitted = True
            if one.kept is not None:
                times_s = [entry.time_s for entry in one.request.entries]
                self._resends.record_request(one.request.node, one.kept, min(times_s) + one.offset_s)
                self._telemetry.resent.inc(len(times_s))
            for at in compress(count(), islice(new, len(one.late))):
                if one.late[at]:
                    self._show_late(one, at)
                elif self._show_one(one, at, rows):
                    new_nodes.append(one.request.node)
        self._observe_rows(batches_of(rows))
        return new_nodes

    def _show_one(self, one: _Taken, at: int, rows: list[Row]) -> bool:
        """Pass on one frame, a plain row by adding it to ``rows``; return whether its node is new."""
        known, entry, moved_s = one.request.known[at], one.request.entries[at], one.moved_s[at]
        if known is not None:
            known.admitted = True
            offset_s = one.offset_s + moved_s
            rows.append(Row(known.resolved, entry.sequence, entry.time_s, one.received_s, offset_s, entry.raw))
            return self._fleet.heard_row(known.resolved, entry.time_s + moved_s, one.received_s)
        frame = one.request.frames[at]
        self._observe_rows(batches_of(rows))  # keeps the node's earlier rows before it
        rows.clear()
        new = self._fleet.heard(frame, one.received_s, moved_s)
        dated = self._fleet.dated(frame, one.offset_s + moved_s, one.received_s)
        self._observe(dated, one.received_s, one.offset_s)
        return new

    def _show_late(self, one: _Taken, at: int) -> None:
        self._telemetry.late.inc()
        frame, newest = one.request.frames.get(at), self._fleet.last(one.request.node)
        lasting = belated(frame, newest) if frame is not None and newest is not None else None
        if newest is not None and lasting is not None:
            offset_s = one.offset_s + one.moved_s[at]
            observe = self._observe if one.kept is None else self._observe_again
            observe(self._fleet.dated(lasting, offset_s, one.received_s), newest.received_s, offset_s)

    async def _introduce(self, nodes: list[str], answers: Sequence[tuple[_Taken, int, int]]) -> None:
        try:
            await self._found(nodes)
        finally:
            self._acknowledge(answers)

    def _acknowledge(self, answers: Sequence[tuple[_Taken, int, int]]) -> None:
        """Answer requests, each given with the number of its new frames and its stream's watermark."""
        requests = self._requests([one.request.node for one, _, _ in answers])
        for (one, new, watermark), asked in zip(answers, requests, strict=True):
            self._settle(one)
            said = b'{"accepted":%d,"duplicates":%d,"watermark":%d' % (new, len(one.late) - new, watermark)
            said += asked + self._ending(one.request.interval_s)
            if one.unknown:
                said += b',"unknown":' + msgspec.json.encode(one.unknown)
            one.reply(200, said + b"}", NO_HEADERS)
        accepted, total = sum(new for _, new, _ in answers), sum(len(one.late) for one, _, _ in answers)
        sizes, begun_s = [one.size for one, _, _ in answers], [one.started_s for one, _, _ in answers]
        self._count(accepted, total, sum(sizes), begun_s)

    def _requests(self, nodes: Sequence[str]) -> list[bytes]:
        """Return for each node the part of its answer with the requests to its agent, empty if there are none.

        After an error none are passed on: what is durable must be acknowledged, and later answers repeat requests.
        """
        try:
            if self._has_requests():
                asked = map(self._asked_of, nodes)
                return [b',"requests":' + msgspec.json.encode(one) if one else b"" for one in asked]
        except Exception:  # noqa: BLE001 - the waiting clients must be answered
            _log.exception("requests to agents could not be looked up; a later answer passes them on")
            self._telemetry.failures.labels("requests").inc()
        return [b""] * len(nodes)

    def _ending(self, interval_s: float) -> bytes:
        """Return the part of an answer that names the journal, and tells agents of a crowd how to take turns."""
        crowd_s = self._fleet.known_count * CROWD_S
        if crowd_s < CROWD_S_MIN:
            return self._journal
        spread = b'%b,"spread_seconds":%.2f' % (self._journal, min(crowd_s, SPREAD_RATIO * interval_s))
        every_s = self._resends.every_s()
        return spread if every_s < RESEND_EVERY_S_MIN else b'%b,"resend_seconds":%.2f' % (spread, every_s)

    def _count(self, accepted: int, total: int, size: int, started_s: Sequence[float]) -> None:
        now_s = self._clock.monotonic_s()
        self._telemetry.frames.inc(accepted)
        self._telemetry.duplicates.inc(total - accepted)
        self._telemetry.bytes.inc(size)
        self._telemetry.ingest_seconds.observe_all([now_s - one_s for one_s in started_s])

    def _refuse(self, requests: Sequence[_Taken] | Sequence[Usual], refusal: Refusal) -> None:
        for one in requests:
            if isinstance(one, Usual):
                reply: Reply = one.asker.answer
            else:
                reply = one.reply
                self._settle(one)
            reply(refusal.status, refusal.document(), refusal.headers)
        self._telemetry.rejected.labels(refusal.reason).inc(len(requests))

    def _settle(self, one: _Taken) -> None:
        if False not in one.late:
            self._late_now[one.kept is not None] -= 1


def _batch(taken: Sequence[_Taken]) -> Batch:
    """Return the requests' entries as one batch."""
    lines = (
        (one.request.ref, entry.sequence, entry.time_s, one.received_s, one.offset_s + by_s, entry.raw)
        for one in taken
        for entry, by_s in zip(one.request.entries, one.moved_s, strict=True)
    )
    return Batch.of(lines, {known.id: known.raw for one in taken for known in one.request.fresh})


def _answers(taken: Sequence[_Taken], appended: Appended) -> list[tuple[_Taken, int, int]]:
    """Return each request with the number of its new frames and its stream's watermark."""
    answers, at = [], 0
    for one in taken:
        end = at + len(one.late)
        answers.append((one, sum(appended.new[at:end]), appended.watermarks[end - 1]))
        at = end
    return answers


def _unavailable(error: HistoryUnavailable) -> Refusal:
    return Refusal(503, "storage", str(error), {"Retry-After": str(RETRY_UNAVAILABLE_S)})


def _on(loop: asyncio.AbstractEventLoop, written: Callable[[Future[Appended]], None], done: Future[Appended]) -> None:
    try:
        loop.call_soon_threadsafe(written, done)
    except RuntimeError:
        return  # the event loop has ended, and with it every waiting client


# A plain ASGI endpoint in front of the API: it reads bodies with a limit and avoids the cost of routing. Frames come
# whole (version 1 of the wire format) or as rows (version 2); ``RowsIngest`` handles both once decoded. Fields of newer
# agents that this server does not know are ignored, counted, and named in the log and in the answer. The history keeps
# them: a newer server can read them.

PATH = "/api/v1/frames"
DECODE_INLINE_BYTES_MAX = 1 << 16  # larger bodies are decoded in a thread, so that the event loop stays responsive


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
            raise raw_http.method_refusal(scope["method"], ["POST"])
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
