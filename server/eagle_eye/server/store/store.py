"""What the records are to the server: kinds, the Store, changes in one transaction, and who waits for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.records import (
    Action,
    Attempt,
    AttemptMembers,
    AuditEntry,
    CellStatus,
    Delivery,
    Derived,
    DriverError,
    EndedSessions,
    EvidenceRequest,
    ForgottenNode,
    Gpu,
    GpuChecks,
    Incident,
    Job,
    JobCell,
    LastCodes,
    NewsSilence,
    Node,
    NodeCheck,
    OutboundEvent,
    Subscription,
    SubscriptionHealth,
    Ticket,
    Token,
)

RecordT = TypeVar("RecordT", bound=msgspec.Struct)
Filters = Mapping[str, str | Sequence[str]]  # by name; with several values any one matches

PAGE_LIMIT_MAX = 1_000
# States in which an incident still concerns the detection loop.
OPEN_INCIDENT_STATES = ("suspected", "confirmed", "acting", "recovered")

# Final states of a job.
OVER_JOB_STATES = ("cancelled", "preempted", "timeout", "failed", "finished")


@dataclass(frozen=True)
class Kind(Generic[RecordT]):
    """One kind of record: its table, the field that identifies it, and the fields that lists are filtered by.

    ``lists`` maps a filter's name to the path of a list that must contain the value; "ranks[*].node" looks into the
    list's objects. With several lists of one name, one match is enough. ``time`` is the field used for ``since_s``, ""
    for none.
    """

    name: str
    record: type[RecordT]
    key: str
    columns: tuple[str, ...]
    lists: tuple[tuple[str, str], ...] = ()
    time: str = ""

    @property
    def filters(self) -> tuple[str, ...]:
        """Names of the filters of this kind's lists."""
        return (*self.columns, *dict.fromkeys(name for name, _ in self.lists))

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of the table's columns before ``record``."""
        return (*dict.fromkeys((self.key, *self.columns)),)


INCIDENTS = Kind("incidents", Incident, "id", ("job", "state", "fault"), (("node", "nodes"),), "detected_s")
ACTIONS = Kind("actions", Action, "id", ("incident_id", "job", "kind", "state", "created_s"), (("node", "exclude"),))
NODES = Kind("nodes", Node, "node", ("state",))
JOBS = Kind("jobs", Job, "job", ("state",), (("node", "ranks[*].node"), ("node", "nodes")))
SUBSCRIPTIONS = Kind("subscriptions", Subscription, "id", ("active",))
SUBSCRIPTION_HEALTH = Kind("subscription_health", SubscriptionHealth, "subscription_id", ())
DELIVERIES = Kind(
    "deliveries",
    Delivery,
    "id",
    ("subscription_id", "event_id", "type", "state", "group", "sequence", "due_s", "expires_s", "created_s"),
)
SILENCES = Kind("silences", NewsSilence, "id", ("state", "until_s"))
ENDED_SESSIONS = Kind("ended_sessions", EndedSessions, "person", ("ended_s",))
TOKENS = Kind("tokens", Token, "id", ("sha256", "node"))
EVENTS = Kind("events", OutboundEvent, "id", ("type", "job", "group", "time_s"))
EVIDENCE = Kind("evidence", EvidenceRequest, "id", ("incident_id", "job", "node", "state"))
NODE_CHECKS = Kind("node_checks", NodeCheck, "id", ("node", "state", "created_s"))
ATTEMPTS = Kind("attempts", Attempt, "id", ("job", "run", "end", "started_s"))
MEMBERSHIPS = Kind("memberships", AttemptMembers, "id", ("job", "started_s"))
GPUS = Kind("gpus", Gpu, "uuid", ("node", "seen_s", "moved"), (("seat", "moves[*].node"),))
GPU_CHECKS = Kind("gpu_checks", GpuChecks, "uuid", ("last_s",))
DRIVER_ERRORS = Kind("driver_errors", DriverError, "id", ("node", "uuid", "last_s"))
TICKETS = Kind("tickets", Ticket, "id", ("node", "opened_s"))
LAST_CODES = Kind("last_codes", LastCodes, "node", ())
FORGOTTEN_NODES = Kind("forgotten_nodes", ForgottenNode, "node", ("forgotten_s",))
CELLS = Kind("cells", CellStatus, "cell", ())
JOB_CELLS = Kind("job_cells", JobCell, "job", ("cell", "over_s"))

KINDS = (  # in the order in which a commit writes them; events at the end, with their deliveries
    SUBSCRIPTIONS,
    SILENCES,
    TOKENS,
    ENDED_SESSIONS,
    NODES,
    JOBS,
    JOB_CELLS,
    CELLS,
    INCIDENTS,
    ACTIONS,
    DELIVERIES,
    SUBSCRIPTION_HEALTH,
    EVIDENCE,
    NODE_CHECKS,
    ATTEMPTS,
    MEMBERSHIPS,
    GPUS,
    GPU_CHECKS,
    DRIVER_ERRORS,
    TICKETS,
    LAST_CODES,
    FORGOTTEN_NODES,
    EVENTS,
)


@dataclass(frozen=True)
class Change:
    """Records to write in one transaction; each replaces the one with its id.

    Every event gets its ``sequence`` and, for every active subscription that wants it, a delivery, in the same
    transaction. An event whose id is already known is ignored, so that committing twice announces once.
    ``forgotten_nodes`` are deleted, and so are their ``last_codes``.
    """

    incidents: tuple[Incident, ...] = ()
    actions: tuple[Action, ...] = ()
    nodes: tuple[Node, ...] = ()
    jobs: tuple[Job, ...] = ()
    events: tuple[OutboundEvent, ...] = ()
    audit: tuple[AuditEntry, ...] = ()
    subscriptions: tuple[Subscription, ...] = ()
    deliveries: tuple[Delivery, ...] = ()
    tokens: tuple[Token, ...] = ()
    evidence: tuple[EvidenceRequest, ...] = ()
    node_checks: tuple[NodeCheck, ...] = ()
    subscription_health: tuple[SubscriptionHealth, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    memberships: tuple[AttemptMembers, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    gpu_checks: tuple[GpuChecks, ...] = ()
    driver_errors: tuple[DriverError, ...] = ()
    tickets: tuple[Ticket, ...] = ()
    last_codes: tuple[LastCodes, ...] = ()
    forgotten_nodes: tuple[ForgottenNode, ...] = ()
    silences: tuple[NewsSilence, ...] = ()
    cells: tuple[CellStatus, ...] = ()
    job_cells: tuple[JobCell, ...] = ()
    ended_sessions: tuple[EndedSessions, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to write."""
        return not any(getattr(self, name) for name in self.__dataclass_fields__)


class Page(NamedTuple, Generic[RecordT]):
    """Records, newest first, and the cursor of the next page; None on the last page."""

    items: list[RecordT]
    next: str | None


class Changed(NamedTuple):
    """One record that changed: its kind's name and its key; ``sequence`` increases with every change."""

    sequence: int
    kind: str
    key: str


class Marks(NamedTuple):
    """How far the records have changed: each number increases with every change, of any token and of any record."""

    tokens: int
    newest: int  # the sequence of the newest change, 0 if nothing ever changed


class Backlog(NamedTuple):
    """The backlog of one subscription: number of deliveries, and the time of the oldest one's event."""

    subscription_id: str
    pending: int
    oldest_s: float


class Due(NamedTuple):
    """A delivery that is due and first of its group; ``urgent``: it, or one waiting behind it, is an action's."""

    delivery: Delivery
    urgent: bool


class Upcoming(NamedTuple):
    """A subscription's deliveries that are first of their group: whether one is due, and when the next will be.

    ``next_s`` is after now; None if all are due.
    """

    due: bool
    next_s: float | None


class Store(Protocol):
    """Durable records. Every method may be called from any thread and raises StoreUnavailable when the disk fails.

    What writes raises NotLeading, and has written nothing, where another server of the same records leads by now.
    """

    def ensure_leading(self) -> None:
        """Raise NotLeading where another server of the same records leads, or may lead by now."""
        ...

    def commit(self, change: Change) -> None:
        """Make the whole change durable, or nothing of it."""
        ...

    def update(self, work: Callable[[Store], Change]) -> Change:
        """Commit what ``work`` returns, with no other commit between its reads and the write; return it.

        Use this for every read-modify-write: between a plain read and a commit the record may change, and that change
        would be lost.
        """
        ...

    def get(self, kind: Kind[RecordT], key: str) -> RecordT | None:
        """Return the record, or None if there is none of that id."""
        ...

    def missing(self, kind: Kind[RecordT], keys: Sequence[str]) -> list[str]:
        """Return those of the keys that no record has."""
        ...

    def new_id(self, what: Derived, given: Container[str] = ()) -> str:
        """Return the id of what is to be made now, not one of those ``given`` out and not written.

        Raises StoreUnavailable. To be called where it is committed, within ``update``.
        """
        ...

    def page(
        self,
        kind: Kind[RecordT],
        filters: Filters,
        cursor: str | None = None,
        limit: int = 100,
        search: str = "",
        since_s: float | None = None,
    ) -> Page[RecordT]:
        """Return the newest records that match, at most ``limit``, and a cursor to the next page.

        Whatever has a job has the filter ``cell``, beside those of its kind.

        ``search`` is a case-insensitive part of the key; ``since_s`` is the minimum of their kind's ``time``. Raises
        BadCursor for a cursor that no page gave.
        """
        ...

    def all(self, kind: Kind[RecordT]) -> list[RecordT]:
        """Return all records of a kind, oldest first; for the small kinds."""
        ...

    def open_incidents(self) -> list[Incident]:
        """Return the incidents in state suspected, confirmed, acting or recovered, oldest first."""
        ...

    def actions_since(self, since_s: float) -> list[Action]:
        """Return the actions created at ``since_s`` or later, oldest first."""
        ...

    def actions_of(self, incident_id: str) -> list[Action]:
        """Return an incident's actions, oldest first."""
        ...

    def due_deliveries(self, subscription_id: str, now_s: float, limit: int) -> list[Due]:
        """Return the pending deliveries that are due and first of their group: urgent ones first, then oldest first."""
        ...

    def upcoming(self, now_s: float) -> dict[str, Upcoming]:
        """Return for each subscription with pending deliveries whether any is due, and when the next will be."""
        ...

    def subscription_deliveries(self, subscription_id: str) -> list[Delivery]:
        """Return a subscription's pending deliveries, oldest first."""
        ...

    def expired_deliveries(self, now_s: float, limit: int) -> list[Delivery]:
        """Return pending deliveries whose event is stale."""
        ...

    def failed_deliveries(self, subscription_id: str, since_s: float, now_s: float, limit: int) -> list[Delivery]:
        """Return a subscription's failed deliveries of events since ``since_s`` that are not stale, oldest first."""
        ...

    def backlog(self) -> list[Backlog]:
        """Return the backlog of each subscription that has one."""
        ...

    def reported(self, subscription_id: str, group: str) -> bool:
        """Return whether an event of this group, an incident's id, went to the subscription."""
        ...

    def token_by_sha256(self, sha256: str) -> Token | None:
        """Return the token with this hash, even if it is revoked or expired."""
        ...

    def any_token(self) -> bool:
        """Return whether any token was ever created, including revoked and expired ones."""
        ...

    def marks(self) -> Marks:
        """Return how far the records have changed, whoever changed them: one question for all who wait for it."""
        ...

    def changes_since(self, sequence: int, limit: int) -> list[Changed]:
        """Return what changed after ``sequence``, oldest first."""
        ...

    def change_range(self) -> tuple[int, int]:
        """Return the sequences of the oldest change kept and of the newest; (0, 0) if nothing ever changed."""
        ...

    def audit(
        self,
        cursor: str | None = None,
        limit: int = 100,
        subject: str | Sequence[str] | None = None,
        who: str | None = None,
        verb: str | None = None,
        since_s: float | None = None,
    ) -> Page[AuditEntry]:
        """Return the audit trail, newest first; all given filters must match, with several subjects any of them."""
        ...

    def count(self, kind: Kind[RecordT]) -> int:
        """Return how many records of a kind there are."""
        ...

    def retire(self, kind: Kind[RecordT], column: str, before_s: float, limit: int) -> int:
        """Delete at most ``limit`` records of a kind whose time in ``column`` is older; return how many."""
        ...

    def prune(self, now_s: float, retention_s: float) -> int:
        """Delete what is older than ``retention_s`` and settled, old heartbeats and changes; return how many events."""
        ...

    def probe(self) -> None:
        """Raise StoreUnavailable unless a transaction can be written."""
        ...

    def listen(self, callback: Callable[[], None]) -> None:
        """Register ``callback`` for each commit, called in the thread that committed; it must not block."""
        ...

    def close(self) -> None:
        """Release the files."""
        ...


class ChangeSignal:
    """Any number of waiters; each ``notify`` wakes all current waiters and sets the events of all others."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: set[asyncio.Event] = set()

    def attach(self) -> None:
        """Bind to the running loop; before this, ``notify`` does nothing."""
        self._loop = asyncio.get_running_loop()

    def detach(self) -> None:
        """Release the loop, which is about to close."""
        self._loop = None

    def waiter(self) -> asyncio.Event:
        """Return an event that every later ``notify`` sets; pass it to ``forget`` when done."""
        event = asyncio.Event()
        self._waiters.add(event)
        return event

    def forget(self, event: asyncio.Event) -> None:
        """Stop setting the event."""
        self._waiters.discard(event)

    def notify(self) -> None:
        """Set all waiters' events; may be called from any thread."""
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._set)
        except RuntimeError:
            # The loop closed since the check: no waiter is left.
            return

    def _set(self) -> None:
        for event in self._waiters:
            event.set()


async def wait_for_change(event: asyncio.Event, timeout_s: float) -> bool:
    """Return True once the event is set, which clears it, or False after ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True


_log = logging.getLogger(__name__)


async def repeat(
    work: Callable[[], Awaitable[object]], interval_s: float, failure: str, *, wait_first: bool = False
) -> None:
    """Await ``work()``, then wait ``interval_s``, repeatedly until cancelled; ``wait_first`` swaps the order.

    A pass that raises StoreUnavailable is logged as ``failure``, and the next one tries again. ``interval_s`` 0
    disables the work: then this only waits to be cancelled.
    """
    if interval_s <= 0:
        await asyncio.Event().wait()
    if wait_first:
        await asyncio.sleep(interval_s)
    while True:
        try:
            await work()
        except StoreUnavailable:
            _log.warning("%s: the records cannot be read or written; the next pass tries again", failure)
        await asyncio.sleep(interval_s)
