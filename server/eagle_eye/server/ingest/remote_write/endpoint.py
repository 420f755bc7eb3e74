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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Protocol

import httpx

from eagle_eye.server.history import remote_series
from eagle_eye.server.ingest.fleet import Fleet, Vouchers
from eagle_eye.server.ingest.remote_write import wire
from eagle_eye.server.ingest.remote_write.intake import RefusedSamples, RemoteWriteIntake, Taken, own_cell
from eagle_eye.server.ingest.remote_write.keeper import Keeper, is_ours
from eagle_eye.server.ingest.remote_write.mapping import TARGET_UP
from eagle_eye.server.ingest.remote_write.wire import Malformed, WireSeries, WriteRequest
from eagle_eye.server.ingest.settings import IngestSettings, RemoteWriteSettings
from eagle_eye.server.model.clock import AHEAD_S_MAX, Clock
from eagle_eye.server.model.errors import HistoryBusy, HistoryUnavailable, Refusal, StoreUnavailable
from eagle_eye.server.model.records import Job
from eagle_eye.server.security.auth import Credentials, Principal, Writer
from eagle_eye.server.store.store import JOBS, PAGE_LIMIT_MAX, TOKENS, Store
from eagle_eye.server.telemetry.counters import Telemetry
from eagle_eye.server.transport import raw_http
from eagle_eye.server.transport.raw_http import (
    OF_ONE_CELL,
    ASGIMessage,
    Receive,
    Send,
    answer,
    headers_of,
    read_body,
    refuse,
)

# How far remote writers' clocks are ahead, as requests carry sample times but no sending time. A request's newest
# samples are normally some seconds old; if they are later than its receipt, the sender's clock is ahead. A clock that
# is behind cannot be distinguished from a late request.

LAG_SERIES = 64  # series per request: a few exporters with times of their own do not outvote the others
LAG_S_MAX = 10.0  # of a sender's promptest request in a minute
SET_BACK_S = 30.0  # a larger lag comes from a clock that was set, or an outage, and needs no correction
LAG_WATCHED_S = 60.0
SENDERS_MAX = 1_024


@dataclass(slots=True)
class _Sender:
    offset_s: float
    since_s: float  # start of the observation
    lag_s: float = float("inf")  # the minimum since then


class SenderClocks:
    """What to add to each sender's times: 0.0, or less where its clock is ahead."""

    def __init__(self) -> None:
        self._senders: dict[str, _Sender] = {}

    def offset_s(self, sender: str, series: Sequence[WireSeries], received_s: float) -> float:
        """Take a request's series; return what to add to their samples' times."""
        every = max(len(series) // LAG_SERIES, 1)
        times_ms = [one.samples[-1].time_ms for one in series[::every] if one.samples]
        if not times_ms:
            return 0.0
        newest_s = median_low(times_ms) / 1000.0
        known = self._senders.get(sender)
        if newest_s > received_s + AHEAD_S_MAX + (0.0 if known is None else -known.offset_s):
            while len(self._senders) >= SENDERS_MAX:
                del self._senders[next(iter(self._senders))]
            self._senders[sender] = _Sender(received_s - newest_s, received_s)
            return received_s - newest_s
        if known is None:
            return 0.0
        lag_s = received_s - newest_s - known.offset_s
        known.lag_s = min(known.lag_s, lag_s)
        over = received_s - known.since_s >= LAG_WATCHED_S
        if lag_s > SET_BACK_S or (over and known.lag_s > LAG_S_MAX):
            del self._senders[sender]
            return self.offset_s(sender, series, received_s)
        if over:
            known.since_s, known.lag_s = received_s, lag_s
        return known.offset_s


# Which job each node works for, from declared jobs, and which nodes are vouched for by jobs or tokens. Reads the store
# occasionally, in a thread.

JOBS_FRESH_S = 10.0  # maximum age of the answer; a hundred thousand ranks take a thread some tens of milliseconds
HOLDING_STATES = ("maintenance", "suspended", "completing", "running")  # in which a job holds its nodes; later ones win


class NodeJobs:
    """The declared jobs of nodes; a node of several belongs to the one declared last.

    ``vouchers`` get the nodes that have a job or an agent's token.
    """

    def __init__(self, store: Store, clock: Clock, vouchers: Vouchers) -> None:
        self._store = store
        self._clock = clock
        self._vouchers = vouchers
        self._jobs: dict[str, str] = {}
        self._tokens_version = -1
        self._read_s = -JOBS_FRESH_S
        self._reading: asyncio.Task[None] | None = None

    def job_of(self, node: str) -> str | None:
        """Return the job that the node was declared a member of; None if none is known."""
        return self._jobs.get(node)

    async def refresh(self) -> None:
        """Return once the answers are fresh; if the store cannot be read, the previous ones stay."""
        if self._clock.monotonic_s() - self._read_s < JOBS_FRESH_S:
            return
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._refresh())
        await asyncio.shield(self._reading)

    async def _refresh(self) -> None:
        try:
            self._jobs = await asyncio.to_thread(self._read)
            version, enrolled = await asyncio.to_thread(self._read_tokens)
        except StoreUnavailable:
            return
        self._vouchers.use_jobs(self._jobs.keys())
        if enrolled is not None:
            self._tokens_version = version
            self._vouchers.use_tokens(enrolled)
        self._read_s = self._clock.monotonic_s()

    def _read(self) -> dict[str, str]:
        jobs: list[Job] = []
        for state in HOLDING_STATES:
            jobs += reversed(self._of_state(state))
        return {node: job.job for job in jobs for node in (*job.nodes, *(rank.node for rank in job.ranks))}

    def _read_tokens(self) -> tuple[int, frozenset[str] | None]:
        """Return the tokens' version and the nodes with a valid one; None if no token has changed."""
        version, now_s = self._store.marks().tokens, self._clock.now_s()
        if version == self._tokens_version:
            return version, None
        valid = (
            token.node
            for token in self._store.all(TOKENS)
            if not token.revoked and (token.expires_s is None or token.expires_s > now_s)
        )
        return version, frozenset(node for node in valid if node is not None)

    def _of_state(self, state: str) -> list[Job]:
        """Return the jobs in a state, newest first."""
        found: list[Job] = []
        cursor: str | None = None
        while True:
            page = self._store.page(JOBS, {"state": state}, cursor, PAGE_LIMIT_MAX)
            found += page.items
            cursor = page.next
            if cursor is None:
                return found


# Series of nodes whose jobs other cells judge are sent on to the leaders of these cells. The sender is answered once
# the other cell has them, so that a sender that tries again loses nothing while a cell has no leader for as long as a
# takeover takes. A cell without one for longer must not hold up the others: what is for it is dropped then, and
# counted.

OTHER_CELLS_ANSWER_S = 10.0
CELL_RETRIED_S = 60.0  # so long the sender is asked to try again: a takeover takes seconds, and senders keep minutes
CELL_QUIET_S = 30.0  # without a try for so long, it begins anew
CELL_AGAIN_S = 5.0  # after that, how often the cell is tried, which may take seconds each
JOB_FRESH_S = 300.0  # how long a job label counts for the node's other series
LABELLED_MAX = 100_000  # nodes whose labels are remembered
SAMPLES_WRITTEN = "X-Prometheus-Remote-Write-Samples-Written"

_log = logging.getLogger(__name__)


class CellDirectory(Protocol):
    """What is known of the site's cells; see monitor/cells.py."""

    def other_cell_of(self, job: str) -> str:
        """Return the other cell that judges the job, "" if this one does or nobody was given it."""
        ...

    def url_of(self, cell: str) -> str:
        """Return the URL of the cell's leader, "" where it has none."""
        ...


class _Outage:
    """A cell that did not take what was for it."""

    def __init__(self, now_s: float) -> None:
        self.since_s = now_s
        self.tried_s = now_s
        self.given_up = False


class OtherCells:
    """Knows whose a node's samples are, and brings them to ``path`` there.

    ``job_of`` returns a node's declared job.
    """

    def __init__(
        self,
        cells: CellDirectory,
        job_of: Callable[[str], str | None],
        client: httpx.AsyncClient,
        path: str,
        clock: Clock,
    ) -> None:
        self._cells = cells
        self._job_of = job_of
        self._client = client
        self._path = path
        self._clock = clock
        self._labelled: dict[str, tuple[float, str]] = {}
        self._outages: dict[str, _Outage] = {}

    def cell_of(self, node: str, job: str | None) -> str:
        """Return the other cell that judges the job on the node, "" for none; ``job`` None: no label names it."""
        if job is not None:
            cell = self._cells.other_cell_of(job)
            if cell and len(self._labelled) < LABELLED_MAX:
                self._labelled[node] = (self._clock.monotonic_s(), job)
            elif not cell:
                self._labelled.pop(node, None)
            return cell
        if node in self._labelled:
            seen_s, job = self._labelled[node]
            if self._clock.monotonic_s() - seen_s > JOB_FRESH_S:
                del self._labelled[node]
                job = None
        job = job or self._job_of(node)
        return "" if job is None else self._cells.other_cell_of(job)

    async def bring(self, taken: Taken, authorization: str) -> None:
        """Return once the other cells have what ``taken`` has of theirs, or it is counted there as dropped or refused.

        Raises Refusal 503 where the sender shall try again.
        """
        said = await asyncio.gather(
            *(self._bring(cell, series, authorization, taken) for cell, series in taken.of_cells.items()),
            return_exceptions=True,
        )
        for error in said:
            if error is not None:
                raise error

    async def _bring(self, cell: str, series: Sequence[WireSeries], authorization: str, taken: Taken) -> None:
        now_s = self._clock.monotonic_s()
        samples = sum(len(one.samples) for one in series)
        outage = self._outages.get(cell)
        if outage is not None and outage.given_up and now_s - outage.tried_s < CELL_AGAIN_S:
            taken.left_out["cell_unreached"] += samples
            return
        if outage is not None:
            if now_s - outage.tried_s > CELL_QUIET_S:
                outage.since_s, outage.given_up = now_s, False
            outage.tried_s = now_s
        try:
            no = await self._post(cell, series, authorization)
        except _Unreached as error:
            self._note(cell, str(error), samples, taken)
            return
        if self._outages.pop(cell, None) is not None:
            _log.info("cell %s takes samples of remote write again", cell)
        if no is not None:
            refused, detail = no
            taken.refuse("cell", refused, f"cell {cell}: {detail}")

    def _note(self, cell: str, why: str, samples: int, taken: Taken) -> None:
        """Have the sender try again, or drop the samples where it was asked to for long enough."""
        now_s = self._clock.monotonic_s()
        outage = self._outages.setdefault(cell, _Outage(now_s))
        outage.tried_s = now_s
        if now_s - outage.since_s < CELL_RETRIED_S:
            detail = f"cell {cell} judges jobs of these nodes, and {why}; send again"
            raise Refusal(503, "standby", detail, {"Retry-After": "1"})
        if not outage.given_up:
            outage.given_up = True
            _log.warning("samples of remote write for cell %s are dropped: %s for %d s", cell, why, CELL_RETRIED_S)
        taken.left_out["cell_unreached"] += samples

    async def _post(self, cell: str, series: Sequence[WireSeries], authorization: str) -> tuple[int, str] | None:
        """Return how many samples the cell refuses and why, None where it has all. Raises _Unreached."""
        url = self._cells.url_of(cell)
        if not url:
            raise _Unreached("it has no leader at present")
        body = await asyncio.to_thread(lambda: remote_series.compressed(wire.request_v1(series)))
        headers = {
            "content-type": remote_series.CONTENT_TYPE,
            "content-encoding": "snappy",
            OF_ONE_CELL.decode(): "1",
            **({"authorization": authorization} if authorization else {}),
        }
        try:
            answer = await self._client.post(httpx.URL(url).copy_with(path=self._path), content=body, headers=headers)
        except (httpx.HTTPError, OSError) as error:  # only the type: the text may contain an address
            raise _Unreached(f"its leader, {url}, cannot be reached ({type(error).__name__})") from error
        if answer.is_success:
            return None
        detail = f"HTTP {answer.status_code} {_detail(answer)}"
        if answer.status_code >= 500 or answer.status_code in (408, 429):
            raise _Unreached(f"its leader, {url}, answers {detail}")
        written = answer.headers.get(SAMPLES_WRITTEN, "0")
        samples = sum(len(one.samples) for one in series)
        return samples - (min(int(written), samples) if written.isascii() and written.isdigit() else 0), detail


class _Unreached(Exception):
    """The cell did not take the samples, and may later."""


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])[:1000]
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


# The endpoint itself.

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


class WriterAuthenticator(Protocol):
    """Identifies the sender; see auth.py."""

    def authenticate(self, credentials: Credentials) -> Principal:
        """Return the principal of the credentials. Raises Refusal 401 or 403."""
        ...

    def authorise_remote_write(self, principal: Principal) -> Writer:
        """Return what the principal may write. Raises Refusal 403."""
        ...


@dataclass(frozen=True, slots=True)
class WriteStages:
    """What a request's samples pass through.

    Only series of ``wanted`` names are decoded; ``membership`` knows their nodes' jobs, ``intake`` makes moments of
    them, ``keeper`` makes these durable. ``other_cells`` None: every job is this server's.
    """

    wanted: frozenset[bytes]
    membership: NodeJobs
    intake: RemoteWriteIntake
    keeper: Keeper
    other_cells: OtherCells | None = None


class RemoteWrite:
    """The endpoint. ``admit(principal)`` raises Refusal 503 where requests come too often."""

    def __init__(
        self,
        settings: RemoteWriteSettings,
        ingest: IngestSettings,
        auth: WriterAuthenticator,
        admit: Callable[[Principal], None],
        fleet: Fleet,
        stages: WriteStages,
        telemetry: Telemetry,
        clock: Clock,
    ) -> None:
        self._admit = admit
        self._other_cells = stages.other_cells
        self._settings = settings
        self._ingest = ingest
        self._auth = auth
        self._fleet = fleet
        self._intake = stages.intake
        self._keeper = stages.keeper
        self._membership = stages.membership
        self._wanted = stages.wanted
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
            raise raw_http.method_refusal(scope["method"], ["POST"])
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
        self._fleet.unmapped_senders.record_request(principal.who, written.unwanted_names, received_s, mapped=mapped)
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
                self._intake.add_series(part, received_s, admit, taken, offset_s, cell_of)
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
            announced = wire.announced_bytes(body)
            if announced > limit:
                raise Refusal(
                    413,
                    "oversized",
                    f"the body announces {announced} bytes; at most {limit} are unpacked"
                    " (remote_write.decompressed_bytes_max): send fewer samples (max_samples_per_send)",
                )
            content = wire.uncompressed(body, announced)
            read = wire.read_v2 if version == V2 else wire.read_v1
            return read(content, self._wanted, self._settings.request_series_max)
        except wire.BadSnappy as error:
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
