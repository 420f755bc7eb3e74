"""Reads requests of frames: decodes and validates their bodies, and says what holds for frames however they arrive.

Whole frames and rows become the same ``Request``: later stages do not distinguish them. The common request of a large
fleet, a single row of numbers whose template is known, is decoded in bulk (``read_single_rows``).
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from eagle_eye.schema.frame import (
    TIME_S_MAX,
    BadFrame,
    DecodedFrame,
    Frame,
    Rank,
    decode_request,
    read_frame,
    unknown_keys,
)
from eagle_eye.schema.rows import (
    MAGIC,
    REQUEST_HEAD,
    ROW_HEAD,
    SIZE,
    VERSION,
    RowTemplate,
    check_size,
    decode_rows_request,
    decode_template,
    is_row,
    names_none,
    read_row,
    row_head,
    template_id,
    unknown_template_keys,
)
from eagle_eye.server.history.history import LATE_S
from eagle_eye.server.ingest.fleet import Fleet, Heard, job_of
from eagle_eye.server.model.batch import Batch, ResolvedTemplate, StreamRef
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import HistoryUnavailable, Refusal
from eagle_eye.server.security.auth import Credentials, Principal, Rates
from eagle_eye.server.telemetry.counters import Telemetry

KEYS_EVERY = 64  # one whole frame in this many per stream, starting with the first, is checked for unknown keys
KEPT_DIGITS_MAX = 8  # of the number of frames that follow
RETRY_BUSY_S = 1
RETRY_UNAVAILABLE_S = 5
# Likewise those that another server acknowledged before: agents are told at what pace to send them.
RESENT_AT_ONCE_MAX = 32
LATE_AT_ONCE_MAX = 4  # concurrent requests with late frames only: after an outage a whole fleet has an hour to resend

# Events that stay true: what happened to a device, a process or the node, not which phase it was in.
LASTING = frozenset(
    {"xid", "sxid", "gpu_lost", "machine_check", "kernel_panic", "host_error", "oom_kill"}
    | {"process_exit", "training_error"}
)


class Authenticator(Protocol):
    """Identifies the sender; see auth.py."""

    def authenticate(self, credentials: Credentials) -> Principal:
        """Return the principal of the credentials. Raises Refusal 401 or 403."""
        ...

    def authorise_frames(self, principal: Principal, node: str) -> None:
        """Raise Refusal 403 unless the principal may send the node's frames."""
        ...


def refusal_of(error: BadFrame, where: str) -> Refusal:
    """Return the refusal for an unusable frame."""
    return Refusal(413 if error.reason == "oversized" else 400, error.reason, f"{where}: {error}"[:2000])


def belated(frame: Frame, newest: Heard) -> Frame | None:
    """Return the part of a late frame that the detection loop gets: its lasting events, in the context of ``newest``.

    None if there is none. An event that names no attempt counts only while the same attempts run.
    """
    same = job_of(frame) == newest.job and _attempts(frame.ranks) == _attempts(newest.ranks)
    events = [event for event in frame.events if event.kind in LASTING and (same or "attempt" in event.attributes)]
    if not events or newest.farewell:
        return None
    standing = {"job": newest.job, "ranks": list(newest.ranks), "collectors": dict(newest.collectors)}
    return msgspec.structs.replace(frame, **standing, blocks=[], events=events)


def _attempts(ranks: Sequence[Rank]) -> set[tuple[str, int]]:
    return {(rank.job, rank.attempt) for rank in ranks}


# Fields of newer agents that this server does not know, and invalid names: counted and reported, and ignored.

LOGGED_MAX = 256  # distinct things named in the log: a hostile agent could invent more forever
ANSWERED_MAX = 32  # named in one answer: an agent reads 64 KiB of it

INVALID = ("name ", "number ")  # invalid in every version: not a possible job name or rank
_INVALID_SAID = "node %s (agent %r) sends an invalid name or number; it is left out and the rest is kept: %s"
_UNKNOWN_SAID = "node %s (agent %r) sends what this server does not know and leaves out, upgrade the server: %s"

_log = logging.getLogger(__name__)


class UnknownThings:
    """Counts unknown fields, and logs each once."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._named: set[str] = set()

    def count_ignored(self, node: str, agent_version: str, times: Mapping[str, int]) -> list[str]:
        """Count what was ignored in a node's frames, log what is new, and return names for the answer."""
        for name, count in times.items():
            self._telemetry.unknown.labels(name.partition(" ")[0]).inc(count)
        for name in times.keys() - self._named:
            if len(self._named) < LOGGED_MAX:
                self._named.add(name)
                _log.warning(
                    _INVALID_SAID if name.startswith(INVALID) else _UNKNOWN_SAID, node, agent_version[:80], name
                )
        return sorted(times)[:ANSWERED_MAX]


# Templates by id: recently used ones in memory, the rest in the history. Used on the event loop unless stated
# otherwise.

TEMPLATES_KEPT_MAX = 32_768  # in memory, some KiB each; the history has the others

ALONE_BYTES = REQUEST_HEAD.size + SIZE.size + ROW_HEAD.size  # size of a one-row request without its numbers


class KnownTemplate:
    """A validated template.

    ``durable``: the history has it. ``used``: a row of it arrived since ``take_used``. ``admitted``: its node has been
    accepted. ``alone_bytes`` is the size of a request with one such row and nothing else; -1 if such rows are not read
    in columns.
    """

    __slots__ = (
        "admitted",
        "alone_bytes",
        "boot_id",
        "clock_base_s",
        "durable",
        "id",
        "interval_s",
        "node",
        "raw",
        "resolved",
        "used",
    )

    def __init__(self, id_: bytes, raw: bytes, resolved: ResolvedTemplate, *, durable: bool) -> None:
        self.id = id_
        self.raw = raw
        self.resolved = resolved
        self.durable = durable
        self.used = self.admitted = False
        self.node = resolved.node
        self.boot_id = resolved.hollow.boot_id
        self.interval_s = resolved.template.interval_s
        self.clock_base_s = resolved.hollow.base_s
        self.alone_bytes = -1 if resolved.layout is None else ALONE_BYTES + resolved.size


class Templates:
    """All templates that rows may reference; ``look_up`` fetches one from the history by id."""

    def __init__(self, look_up: Callable[[bytes], bytes | None], kept_max: int = TEMPLATES_KEPT_MAX) -> None:
        self._look_up = look_up
        self._kept_max = kept_max
        self._known: dict[bytes, KnownTemplate] = {}
        self._left: deque[bytes] = deque()

    def get(self, id_: bytes) -> KnownTemplate | None:
        """Return the template if it is in memory."""
        return self._known.get(id_)

    def recall(self, id_: bytes) -> KnownTemplate | None:
        """Return the template from memory or disk; None: it must be sent (again). Raises HistoryUnavailable."""
        known = self._known.get(id_)
        if known is None:
            raw = self._look_up(id_)
            try:
                known = None if raw is None else self._keep(raw, durable=True)
            except BadFrame:  # written by another server version
                return None
        return known

    def learn(self, raw: bytes) -> KnownTemplate:
        """Validate and return a template that an agent sent. Raises BadFrame."""
        return self._known.get(template_id(raw)) or self._keep(raw, durable=False)

    def take_used(self) -> list[bytes]:
        """Return the ids of templates used since the last call; from any thread."""
        found = [known for known in list(self._known.values()) if known.used]
        for known in found:
            known.used = False
        return [known.id for known in found]

    def forget(self, ids: Iterable[bytes]) -> None:
        """Mark templates as no longer in the history, after long disuse; from any thread."""
        for id_ in ids:
            known = self._known.get(id_)
            if known is not None:
                known.durable = False
                self._left.append(id_)  # removed by the next insertion: the event loop may be iterating over them now

    def expel(self, nodes: Collection[str]) -> None:
        """Have the next row of each of the nodes checked like one of a new node."""
        for known in self._known.values():
            if known.node in nodes:
                known.admitted = False

    def _keep(self, raw: bytes, *, durable: bool) -> KnownTemplate:
        self._drop_left()
        id_ = template_id(raw)
        known = self._known[id_] = KnownTemplate(id_, raw, ResolvedTemplate(*decode_template(raw)), durable=durable)
        while len(self._known) > self._kept_max:
            del self._known[next(iter(self._known))]
        return known

    def _drop_left(self) -> None:
        """Drop the templates that the history no longer has from memory, unless a row of them has arrived since."""
        while self._left:
            id_ = self._left.popleft()
            known = self._known.get(id_)
            if known is not None and not known.durable:
                del self._known[id_]


LEARNED_PER_S, LEARNED_AT_ONCE = 1_500, 1_500  # templates: each costs about a hundred times as much as one of its rows
RETRY_LEARN_S = 2


T = TypeVar("T")


class Entry(NamedTuple):
    """One frame as received: its sequence in its stream, its own time (by its node's clock), and its bytes."""

    sequence: int
    time_s: float
    raw: bytes


class Request(msgspec.Struct, frozen=True, gc=False):
    """A decoded body. ``known`` has each entry's template, None for an entry whose frame is in ``frames``.

    ``boot_id`` and ``clock_base_s`` are those that the last entry reports. ``fresh`` are the templates among them that
    may not be durable yet; ``unknown`` counts ignored fields by name.
    """

    node: str
    ref: StreamRef
    interval_s: float
    agent_version: str
    boot_id: str
    sent_s: float
    clock_base_s: float | None
    entries: tuple[Entry, ...]
    known: tuple[KnownTemplate | None, ...]
    frames: Mapping[int, Frame]
    fresh: tuple[KnownTemplate, ...]
    unknown: Counter[str]


class _One(NamedTuple):
    """One row; ``reading`` is its decoded frame if it has more than numbers."""

    says: RowTemplate | Frame
    known: KnownTemplate | None
    entry: Entry
    reading: DecodedFrame | None

    @property
    def base_s(self) -> float | None:
        """The base of the clock that dated the row."""
        if self.known is not None:
            return self.known.clock_base_s
        return self.reading.frame.base_s if self.reading is not None else None


class RowsReader:
    """Decodes bodies; on the event loop. ``unknown`` counts what this server does not know in them."""

    def __init__(self, templates: Templates, unknown: UnknownThings, inflated_bytes_max: int, clock: Clock) -> None:
        self._clock = clock
        self._learns = Rates(keys_max=1)
        self._templates = templates
        self.unknown = unknown
        self._inflated_bytes_max = inflated_bytes_max

    def inflated(self, body: bytes) -> bytes:
        """Return a zlib-compressed body decompressed. Raises Refusal."""
        limit = self._inflated_bytes_max
        inflater = zlib.decompressobj()
        try:
            whole = inflater.decompress(body, limit + 1)
        except zlib.error as error:
            raise Refusal(400, "truncated", f"the body cannot be decompressed (zlib): {error}") from None
        if len(whole) > limit:
            raise Refusal(413, "oversized", f"the body has more than {limit} bytes once decompressed: send less")
        if not inflater.eof:
            raise Refusal(400, "truncated", "the compressed body ends before its data does")
        return whole

    def read(self, body: bytes) -> Request:
        """Decode a body of rows. Raises Refusal: 400, 409 for a template that must be sent, 413, 503."""
        sent_s, templates, rows = _checked(decode_rows_request, body, "the request")
        if not rows:
            raise Refusal(400, "empty", "the request has no rows; send at least one")
        self._learn(templates)
        return _request(sent_s, [_checked(self._one, row, f"row {at}") for at, row in enumerate(rows)], "row")

    def alone(self, id_: bytes, size: int) -> KnownTemplate | None:
        """Return the template if a body of ``size`` bytes is a single row of it; None: decode it with ``read``."""
        known = self._templates.get(id_)
        if known is None or size != known.alone_bytes or not (known.durable and known.admitted):
            return None
        known.used = True
        return known

    def _learn(self, templates: Sequence[bytes]) -> None:
        for at, raw in enumerate(templates):
            if self._templates.get(template_id(raw)) is None:
                self._make_room()
            try:
                known = self._templates.learn(raw)
            except BadFrame as error:
                raise refusal_of(error, f"template {at}") from None
            resolved = known.resolved
            left_out = (*unknown_template_keys(raw), *filter(names_none, resolved.unknown))
            if left_out:
                self.unknown.count_ignored(resolved.node, resolved.template.agent_version, Counter(left_out))

    def _one(self, row: bytes) -> _One:
        """Decode a row, or a whole frame among rows. Raises BadFrame, Refusal."""
        if row and not is_row(row):
            return _whole(row)
        head = row_head(row)
        known = self._find(head.template_id)
        known.used = True
        template, entry = known.resolved.template, Entry(head.sequence, head.time_s, row)
        if head.tail_bytes or known.resolved.layout is None:
            return _One(template, known, entry, read_row(template, row))
        check_size(known.resolved.size, row, 0)
        return _One(template, known, entry, None)

    def _find(self, id_: bytes) -> KnownTemplate:
        known = self._templates.get(id_)
        if known is None:
            self._make_room()
            try:
                known = self._templates.recall(id_)
            except HistoryUnavailable as error:
                raise Refusal(503, "storage", str(error), {"Retry-After": str(RETRY_UNAVAILABLE_S)}) from None
        if known is None:
            raise Refusal(409, "outline", f"the template {id_.hex()} is not known here; send it with its rows")
        return known

    def _make_room(self) -> None:
        """Raise Refusal unless one more template may be learned now, so that a returning fleet delays no known node."""
        wait_s = self._learns.count_request("", LEARNED_PER_S, LEARNED_AT_ONCE, self._clock.monotonic_s())
        if wait_s > 0.0:
            detail = f"more than {LEARNED_PER_S} agents a second begin to send; send this again in a moment"
            raise Refusal(503, "busy", detail, {"Retry-After": str(RETRY_LEARN_S)})


def read_whole(body: bytes) -> Request:
    """Decode a body of whole frames. Raises Refusal: 400, 413. Pure."""
    sent_s, raws = _checked(decode_request, body, "the request")
    if not raws:
        raise Refusal(400, "empty", "the request has no frames; send at least one")
    return _request(sent_s, [_checked(_whole, raw, f"frame {at}") for at, raw in enumerate(raws)], "frame")


def _checked(read: Callable[[bytes], T], raw: bytes, where: str) -> T:
    try:
        return read(raw)
    except BadFrame as error:
        raise refusal_of(error, where) from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Refusal(400, "malformed", f"{where} cannot be decoded: {type(error).__name__}") from None


def _whole(raw: bytes) -> _One:
    frame, unknown = reading = read_frame(raw)
    if frame.sequence % KEYS_EVERY == 1:
        reading = DecodedFrame(frame, (*unknown, *unknown_keys(raw)))
    return _One(frame, None, Entry(frame.sequence, frame.time_s, raw), reading)


def _request(sent_s: float, read: Sequence[_One], what: str) -> Request:
    first = read[0].says
    for at, one in enumerate(read[1:], 1):
        if (one.says.node, one.says.stream) != (first.node, first.stream):
            raise Refusal(400, "mixed", f"{what} {at} is of another node or stream than {what} 0; send one a request")
    fresh = {one.known.id: one.known for one in read if one.known is not None and not one.known.durable}
    return Request(
        first.node,
        StreamRef(first.node, first.stream) if read[0].known is None else read[0].known.resolved.ref,
        first.interval_s,
        read[-1].says.agent_version,
        read[-1].says.boot_id,
        sent_s,
        read[-1].base_s,
        tuple([one.entry for one in read]),
        tuple([one.known if one.reading is None else None for one in read]),
        {at: one.reading.frame for at, one in enumerate(read) if one.reading is not None},
        tuple(fresh.values()),
        Counter([name for one in read if one.reading is not None for name in one.reading.unknown]),
    )


# The common request of a large fleet. Requests that are unusual in any way are detected here and left to
# ``RowsIngest.take``.

SEQUENCE_MAX = 1 << 53

# The parts of a request before the numbers: REQUEST_HEAD, SIZE and ROW_HEAD of schema/rows.py.
_SINGLE_HEAD = np.dtype(
    [
        ("magic", "S4"),
        ("templates", "<u2"),
        ("rows", "<u2"),
        ("sent_s", "<f8"),
        ("size", "<u4"),
        ("version", "u1"),
        ("zero", "V3"),
        ("tail", "<u4"),
        ("id", "V16"),
        ("sequence", "<u8"),
        ("time_s", "<f8"),
    ]
)
_SINGLE_ROW = slice(_SINGLE_HEAD.fields["version"][1], None)  # type: ignore[index] # where a request's row begins
TEMPLATE_ID = slice(28, 44)  # the template id in a request
assert _SINGLE_HEAD.itemsize == ALONE_BYTES and _SINGLE_HEAD.fields["id"][1] == TEMPLATE_ID.start  # type: ignore[index] # noqa: S101, PT018


class Asker(Protocol):
    """The client that sent a request and waits for its answer."""

    def accept(self, body: bytes) -> None:
        """Answer 200 with a JSON body."""
        ...

    def answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Answer with a status, a body (a problem document unless 200) and headers."""
        ...

    def refuse(self, error: Exception) -> None:
        """Answer with a problem document: the Refusal, or 500 for any other error."""
        ...


class Usual(msgspec.Struct, frozen=True, gc=False):
    """One request as received; ``started_s`` is by the monotonic clock."""

    known: KnownTemplate
    principal: Principal
    body: bytes
    started_s: float
    asker: Asker


def read_single_rows(
    requests: Sequence[Usual], fleet: Fleet, wall_s: float
) -> tuple[list[tuple[Sequence[Usual], Batch]], list[Usual]]:
    """Return requests as batches, one per layout and each with the requests of its rows, and those to be taken alone.

    ``wall_s`` is the server's clock minus the monotonic one. If a node has several requests, only the first is in
    a batch.
    """
    by_layout: dict[Any, list[Usual]] = {}
    nodes: set[str] = set()
    odd: list[Usual] = []
    for request in requests:
        known = request.known
        if known.node in nodes or not known.durable:
            odd.append(request)
            continue
        nodes.add(known.node)
        by_layout.setdefault(known.resolved.layout, []).append(request)
    found = [_columns(together, fleet, wall_s, odd) for together in by_layout.values()]
    return [one for one in found if one is not None], odd


def _columns(
    requests: Sequence[Usual], fleet: Fleet, wall_s: float, odd: list[Usual]
) -> tuple[Sequence[Usual], Batch] | None:
    matrix = np.frombuffer(b"".join([one.body for one in requests]), np.uint8).reshape(len(requests), -1)
    heads = np.ascontiguousarray(matrix[:, : _SINGLE_HEAD.itemsize]).view(_SINGLE_HEAD)[:, 0]
    sent_s, time_s = heads["sent_s"], heads["time_s"]
    usual = (
        (heads["magic"] == MAGIC)
        & (heads["templates"] == 0)
        & (heads["rows"] == 1)
        & (heads["size"] == matrix.shape[1] - _SINGLE_ROW.start)
        & (heads["version"] == VERSION)
        & (heads["tail"] == 0)
        & (heads["sequence"] > 0)
        & (heads["sequence"] < SEQUENCE_MAX)
        & (time_s > 0.0)
        & (time_s <= sent_s)  # anything else needs the full check for late or implausible times
        & (sent_s - time_s <= LATE_S)
        & (sent_s < TIME_S_MAX)
    )
    received_s = [one.started_s + wall_s for one in requests]
    usual &= [
        ok and fleet.holds_name(one.known.node, one.known.boot_id, at_s, one.known.interval_s)
        for ok, one, at_s in zip(usual.tolist(), requests, received_s, strict=True)
    ]
    if not usual.all():
        odd += [requests[at] for at in np.flatnonzero(~usual).tolist()]
        chosen = np.flatnonzero(usual)
        if not len(chosen):
            return None
        requests = [requests[at] for at in chosen.tolist()]
        received_s = [received_s[at] for at in chosen.tolist()]
        matrix, sent_s, time_s, heads = matrix[chosen], sent_s[chosen], time_s[chosen], heads[chosen]
    knowns = [one.known for one in requests]
    nodes, bases_s = [known.node for known in knowns], [known.clock_base_s for known in knowns]
    offset_s = np.array(fleet.offsets_s(nodes, sent_s.tolist(), received_s, bases_s))
    batch = Batch(
        [known.resolved.ref for known in knowns],
        heads["sequence"].astype(np.int64),
        time_s,
        np.array(received_s),
        offset_s,
        matrix[:, _SINGLE_ROW],
        resolved=[known.resolved for known in knowns],
    )
    return requests, batch
