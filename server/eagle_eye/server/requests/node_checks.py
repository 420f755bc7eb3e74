"""Active node checks: requested from agents with their acknowledgements, run once, and their results applied.

Those for silent data corruption on idle nodes the server requests by itself, within the site's budget. Touches: the
store.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from eagle_eye.server.accounts.node_records import compared
from eagle_eye.server.delivery import events as outbound
from eagle_eye.server.engine import idle_faults, ledger
from eagle_eye.server.engine.idle_faults import FAULT, NO_JOB, WEEK_S, IdleCheckSettings, RequestedCheck, due
from eagle_eye.server.engine.ledger import Offer, suite, unproven
from eagle_eye.server.engine.settings import PolicySettings, in_force
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal, StoreUnavailable
from eagle_eye.server.model.records import (
    AuditEntry,
    CheckOutcome,
    Comparison,
    Gpu,
    Node,
    NodeCheck,
    NodeCheckPurpose,
    NodeCheckState,
    OutboundEvent,
)
from eagle_eye.server.monitor.announcements import together
from eagle_eye.server.monitor.watcher import JobProgress
from eagle_eye.server.requests.idle_incidents import claimed
from eagle_eye.server.store.store import (
    GPU_CHECKS,
    GPUS,
    NODE_CHECKS,
    NODES,
    OVER_JOB_STATES,
    PAGE_LIMIT_MAX,
    Change,
    Store,
    repeat,
)

COLLECTOR = "node_check"  # the collector by which an agent reports in its frames that it can run checks
KIND = "node_check"  # of a request in the answer to frames
READ_EVERY_S = 0.2  # maximum age of the list of open requests when records have changed
SWEEP_S = 5.0
ASKED_S = 60.0  # for an agent to start it; it gets the request with its next frames,
ASKED_INTERVALS = 3.0  # however rare these are
LATE_S = 120.0  # beyond the check's own deadline, for a started check to end and be reported
HEARD_S = 30.0  # an agent silent for longer cannot be asked now
REPORTS_KEPT = 20  # per node; of older checks only the result is kept
DETAIL_CHARS_MAX = 1_000
OPEN_STATES: tuple[NodeCheckState, ...] = ("asked", "running")
SERVER = "server"
RESTARTED = "the agent was restarted while it made the check: it, or the node under load, had died"

Verdict = Literal["healthy", "sick", "cannot_tell"]


def offer_of(fleet: Fleet, node: str, now_s: float) -> Offer:
    """Return whether the node's agent can be asked for a check now, from its latest report."""
    heard = fleet.last(node)
    said = heard.collectors.get(COLLECTOR, "") if heard is not None else ""
    if heard is None or not said:
        return Offer("none", "no agent of it makes checks (node_check_command in the agent's configuration)")
    if heard.farewell:
        return Offer("unable", "its agent has stopped")
    silent_s = now_s - heard.received_s
    if silent_s > max(HEARD_S, ASKED_INTERVALS * heard.interval_s):
        return Offer("unable", f"its agent was not heard for {silent_s:.0f} s")
    return Offer("ready") if said == "ok" else Offer("unable", f"its agent says: {said}")


def asked(
    node: str,
    purpose: NodeCheckPurpose,
    fault: str,
    asked_by: str,
    reason: str,
    interval_s: float,
    now_s: float,
    sdc_s: float = 0.0,
) -> NodeCheck:
    """Return a new request for a check that rules ``fault`` out; ``interval_s`` is that of the node's frames.

    With ``sdc_s`` it includes a check for silent data corruption of that duration.
    """
    wanted = suite(fault, sdc_s)
    return NodeCheck(
        id=f"chk_{secrets.token_hex(16)}",
        node=node,
        purpose=purpose,
        fault=fault,
        state="asked",
        asked_by=asked_by,
        reason=reason,
        checks=list(wanted.checks),
        deadline_seconds=wanted.deadline_s,
        gemm_seconds=wanted.gemm_s,
        sdc_seconds=wanted.sdc_s,
        created_s=now_s,
        updated_s=now_s,
        expires_s=now_s + max(ASKED_S, ASKED_INTERVALS * interval_s),
    )


class NodeChecks:
    """Open node check requests and their results. The store is the source of truth; open requests are cached."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        policy: Callable[[], PolicySettings],
        count: Callable[[NodeCheckState], None],
        public_url: str,
    ) -> None:
        """Create it; ``policy()`` returns the current settings, ``count`` is called with each check's final state."""
        self._store = store
        self._clock = clock
        self._policy = policy
        self._public_url = public_url
        self._count = count
        self._by_node: dict[str, list[NodeCheck]] = {}
        self._changed = threading.Event()
        self._changed.set()
        self._read_s = float("-inf")
        store.listen(self._changed.set)

    def has_requests(self) -> bool:
        """Return whether there are open requests for any node."""
        if self._changed.is_set() and self._clock.monotonic_s() - self._read_s >= READ_EVERY_S:
            self._read()
        return bool(self._by_node)

    def asked_of(self, node: str) -> list[dict[str, Any]]:
        """Return the requests to include in the answer to the node's frames; called for each answer.

        A request is repeated until it is answered: an answer to frames may be lost, and an agent that was restarted
        during a check must report that.
        """
        if not self.has_requests():
            return []
        open_checks = self._by_node.get(node)
        if not open_checks:
            return []
        now_s = self._clock.now_s()
        return [_request(check) for check in open_checks if now_s < check.expires_s][:1]

    def begun(self, id_: str, run: str) -> NodeCheck:
        """Record that the agent starts the check, with its own id of this run; return the record.

        Raises Refusal 409 for a second run, and for a check that is over: a check runs once. A second run ends the
        check: the agent that started it has died, and the node may have as well.
        """

        def change(store: Store) -> Change:
            check = find(store, id_)
            now_s = self._clock.now_s()
            if check.state == "running" and check.run != run:
                return self._end(store, check, "cannot_tell", RESTARTED, ())
            if check.state != "asked" or now_s >= check.expires_s:
                return Change()
            expires_s = now_s + check.deadline_seconds + LATE_S
            new = replace(check, state="running", run=run, began_s=now_s, updated_s=now_s, expires_s=expires_s)
            return Change(node_checks=(new,))

        self._counted(self._store.update(change))
        check = find(self._store, id_)
        if check.state != "running" or check.run != run:
            raise Refusal(409, "not_open", f"check {id_} is {check.state}, and over; a check is made once")
        return check

    def ended(self, id_: str, verdict: Verdict, detail: str, outcomes: Sequence[CheckOutcome] = ()) -> NodeCheck:
        """Record the result of a check, and return its node to service if it was waiting for this; return the record.

        An earlier answer is kept.
        """

        def change(store: Store) -> Change:
            check = find(store, id_)
            return self._end(store, check, verdict, detail, outcomes) if check.state in OPEN_STATES else Change()

        self._counted(self._store.update(change))
        return find(self._store, id_)

    def _counted(self, change: Change) -> None:
        if change.node_checks and change.node_checks[0].state not in OPEN_STATES:
            self._count(change.node_checks[0].state)

    async def run(self) -> None:
        """Sweep every SWEEP_S until cancelled."""
        await repeat(lambda: asyncio.to_thread(self.sweep), SWEEP_S, "node checks are not swept")

    def sweep(self) -> None:
        """End unanswered checks as inconclusive. Raises StoreUnavailable."""
        now_s = self._clock.now_s()
        for state in OPEN_STATES:
            for check in self._of_state(state):
                if now_s >= check.expires_s:
                    self.ended(check.id, "cannot_tell", _unanswered(check))

    def _end(
        self, store: Store, check: NodeCheck, verdict: Verdict, detail: str, outcomes: Sequence[CheckOutcome]
    ) -> Change:
        now_s = self._clock.now_s()
        doubt = unproven(check.fault, outcomes, check.sdc_seconds) if verdict == "healthy" else ""
        state, said = ("cannot_tell", doubt) if doubt else (verdict, detail)
        new = replace(check, state=state, detail=said[:DETAIL_CHARS_MAX], outcomes=list(outcomes), updated_s=now_s)
        # Of a fleet's daily automatic checks, only those with findings are kept whole and audited.
        routine = check.purpose == "idle" and state != "sick"
        kept = replace(new, outcomes=[replace(one, values=[]) for one in outcomes]) if routine else new
        reported = AuditEntry(
            time_s=now_s, who=SERVER, verb=f"check {state}", subject=check.node, detail=f"{check.id}: {said}"
        )
        nodes, events, audit = self._returned(store, new, now_s)
        ended = Change(
            nodes=nodes,
            events=events,
            audit=() if routine else (replace(reported, detail=reported.detail[:4096]), *audit),
            node_checks=(kept, *_shortened(store, kept)),
        )
        return together([ended, self._compared(store, new, now_s)])

    def _compared(self, store: Store, check: NodeCheck, now_s: float) -> Change:
        """Return the records that a check for silent corruption adds to its GPUs, and the incident that it opens.

        The inventory decides which GPUs are the node's: a report cannot write to another node's GPUs.
        """
        if not any(idle_faults.figures(outcome, idle_faults.OPERATIONS) for outcome in check.outcomes):
            return Change()
        gpus = {gpu.uuid: gpu for gpu in store.page(GPUS, {"node": check.node}, limit=PAGE_LIMIT_MAX).items}
        results = [compared(store.get(GPU_CHECKS, one.uuid), one.uuid, one.result) for one in _results(check, gpus)]
        seats = {uuid: gpu.device for uuid, gpu in gpus.items()}
        onset_s = check.began_s or check.created_s
        verdict = idle_faults.found(check.node, check.outcomes, seats, check.id, onset_s)
        of_gpus = Change(gpu_checks=tuple(results))
        if verdict is None:
            return of_gpus
        known = [one for one in store.open_incidents() if one.job == idle_faults.NO_JOB and one.node == check.node]
        policy = self._policy()
        reported = claimed(store, known, verdict, policy, self._public_url, now_s)
        node = store.get(NODES, check.node)
        suspect = Change()
        if node is not None and node.state != "in_service":
            reason = f"{verdict.fault}: {check.id}"
            suspect = Change(nodes=(ledger.take_out(node, verdict.fault, reason, node.state, now_s),))
        return together([of_gpus, reported, suspect])

    def _returned(
        self, store: Store, check: NodeCheck, now_s: float
    ) -> tuple[tuple[Node, ...], tuple[OutboundEvent, ...], tuple[AuditEntry, ...]]:
        node = store.get(NODES, check.node)
        if node is None or node.check_id != check.id:
            return (), (), ()  # only a look, or the node's standing has changed since
        if check.state != "healthy":
            return (replace(node, check_id=""),), (), ()
        reason = check.reason or f"{check.asked_by}: passed {check.id}"
        back = ledger.readmit(node, reason, check.asked_by, now_s, self._policy().watch_s)
        entry = AuditEntry(
            time_s=now_s,
            who=check.asked_by,
            verb="readmit",
            subject=node.node,
            detail=f"{reason} (after {check.id})"[:4096],
        )
        return (back,), (outbound.node_readmitted(back, now_s),), (entry,)

    def _of_state(self, state: NodeCheckState) -> Iterable[NodeCheck]:
        cursor: str | None = None
        while True:
            page = self._store.page(NODE_CHECKS, {"state": state}, cursor, PAGE_LIMIT_MAX)
            yield from page.items
            cursor = page.next
            if cursor is None:
                return

    def _read(self) -> None:
        self._changed.clear()
        self._read_s = self._clock.monotonic_s()
        by_node: dict[str, list[NodeCheck]] = {}
        try:
            for state in OPEN_STATES:
                for check in self._store.page(NODE_CHECKS, {"state": state}, limit=PAGE_LIMIT_MAX).items:
                    by_node.setdefault(check.node, []).append(check)
        except StoreUnavailable:
            self._changed.set()  # frames are acknowledged anyway
            return
        self._by_node = by_node


def _request(check: NodeCheck) -> dict[str, Any]:
    """Return the request as the agent gets it: an element of ``requests`` in the answer to its frames."""
    return {
        "id": check.id,
        "kind": KIND,
        "deadline_s": check.deadline_seconds,
        "checks": check.checks,
        "gemm_s": check.gemm_seconds,
        **({"sdc_s": check.sdc_seconds} if check.sdc_seconds else {}),
    }


def find(store: Store, id_: str) -> NodeCheck:
    """Return the check. Raises Refusal 404."""
    check = store.get(NODE_CHECKS, id_)
    if check is None:
        raise Refusal(
            404, "not_found", f"no check {id_[:80]!r} was asked for; GET /api/v1/nodes/NODE/checks lists them"
        )
    return check


def under_way(store: Store, node: str) -> NodeCheck | None:
    """Return the node's requested or running check; there is at most one."""
    for state in OPEN_STATES:
        items = store.page(NODE_CHECKS, {"node": node, "state": state}, limit=1).items
        if items:
            return items[0]
    return None


class _Result(NamedTuple):
    uuid: str
    result: Comparison


def _results(check: NodeCheck, gpus: Mapping[str, Gpu]) -> Iterator[_Result]:
    """Yield the check's result for each of the node's GPUs."""
    for outcome in check.outcomes:
        if outcome.name != idle_faults.OWN_RESULTS:
            continue
        seconds, wrong = (
            {figure.device: figure.value or 0.0 for figure in idle_faults.figures(outcome, name)}
            for name in (idle_faults.SECONDS, idle_faults.WRONG)
        )
        for figure in idle_faults.figures(outcome, idle_faults.OPERATIONS):
            uuid = figure.device
            if uuid in gpus and uuid in wrong and figure.value:
                result = Comparison(
                    check.id, check.node, check.updated_s, seconds.get(uuid, 0.0), figure.value, wrong[uuid]
                )
                yield _Result(uuid, result)


def _unanswered(check: NodeCheck) -> str:
    if check.state == "asked":
        return "the node's agent did not take it up in time"
    return "it was begun and nothing came of it in time: the agent, or the node under load, may have died"


def _shortened(store: Store, newest: NodeCheck) -> tuple[NodeCheck, ...]:
    """Return the node's check whose report is deleted now that one more is kept."""
    kept = [
        c for c in store.page(NODE_CHECKS, {"node": newest.node}, limit=REPORTS_KEPT + 2).items if c.id != newest.id
    ]
    return tuple(replace(check, outcomes=[]) for check in kept[REPORTS_KEPT - 1 :] if check.outcomes)


# Checks of idle nodes. Like the accounts, this runs beside the detection loop, which only hands over its data.

IDLE_LOOK_S = 30.0
IDLE_REASON = "it has no job (idle_checks)"


class IdleChecks:
    """Does nothing while the settings allow no time for it. The store remembers past requests."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        fleet: Fleet,
        settings: IdleCheckSettings,
        policy: Callable[[], PolicySettings],
        courses: Callable[[], Iterable[JobProgress]],
    ) -> None:
        """Create it; ``policy()`` returns the current settings, ``courses()`` the watched jobs, on the event loop."""
        self._store = store
        self._clock = clock
        self._fleet = fleet
        self._settings = settings
        self._policy = policy
        self._courses = courses
        self._idle_since_s: dict[str, float] = {}
        self._over: list[RequestedCheck] | None = None  # of the last week; None: not read yet
        self._open: dict[str, RequestedCheck] = {}  # by the check's id

    async def run(self) -> None:
        """Look at the fleet every LOOK_S until cancelled."""
        interval_s = IDLE_LOOK_S if self._settings.weekly_budget_s > 0 else 0.0
        await repeat(self._look_at_once, interval_s, "idle nodes are not checked", wait_first=True)

    async def _look_at_once(self) -> None:
        busy = {node for c in self._courses() if c.state not in OVER_JOB_STATES for node in c.nodes}
        await asyncio.to_thread(self.request_due_checks, busy)

    def request_due_checks(self, busy: Iterable[str]) -> list[str]:
        """Request checks of idle nodes that are due; return them. ``busy`` are the nodes of jobs that are not over.

        Raises StoreUnavailable.
        """
        now_s = self._clock.now_s()
        before = self._idle_since_s
        self._idle_since_s = {node: min(before.get(node, now_s), now_s) for node in self._idle(frozenset(busy), now_s)}
        asked_lately = [*self._read(now_s), *self._open.values()]
        turns = due(self._idle_since_s, asked_lately, len(self._open), self._settings, now_s)
        return [node for node in turns if self._ask(node, now_s)]

    def _idle(self, busy: frozenset[str], now_s: float) -> list[str]:
        """Return the in-service nodes without a job (by agents, launchers and schedulers) whose agents can be asked."""
        suspects = {one.node for one in self._store.open_incidents() if one.job == NO_JOB}
        windows = self._policy().maintenance
        return [
            node.node
            for node in self._store.all(NODES)
            if node.node not in busy
            and node.node not in suspects
            and self._is_idle(node, now_s)
            and in_force(windows, NO_JOB, (node.node,), now_s) is None
        ]

    def _is_idle(self, node: Node, now_s: float) -> bool:
        heard = self._fleet.last(node.node)
        if node.state != "in_service" or heard is None or heard.job or heard.ranks:
            return False
        return offer_of(self._fleet, node.node, now_s).state == "ready"

    def _read(self, now_s: float) -> list[RequestedCheck]:
        """Return last week's finished requests; open ones are kept separately."""
        over = self._over
        if over is None:
            over = []
            for check in self._of_the_week(now_s):
                self._sort(check, over)
        for id_ in list(self._open):
            known = self._store.get(NODE_CHECKS, id_)
            if known is not None and known.state not in OPEN_STATES:
                del self._open[id_]
                self._sort(known, over)
        self._over = [one for one in over if now_s - one.time_s < WEEK_S]
        return self._over

    def _sort(self, check: NodeCheck, over: list[RequestedCheck]) -> None:
        if check.state in OPEN_STATES:
            self._open[check.id] = RequestedCheck(check.node, check.created_s)
        else:
            over.append(RequestedCheck(check.node, check.created_s, begun=check.began_s is not None))

    def _of_the_week(self, now_s: float) -> Iterable[NodeCheck]:
        cursor: str | None = None
        while True:
            page = self._store.page(NODE_CHECKS, {}, cursor, PAGE_LIMIT_MAX)
            for check in page.items:
                if now_s - check.created_s >= WEEK_S:
                    return
                if check.purpose == "idle":
                    yield check
            cursor = page.next
            if cursor is None:
                return

    def _ask(self, node: str, now_s: float) -> bool:
        """Request a check of the node, unless it is out or being checked already; return whether one was requested."""
        made: list[NodeCheck] = []

        def change(store: Store) -> Change:
            made.clear()
            record = store.get(NODES, node)
            if record is None or record.state != "in_service" or under_way(store, node) is not None:
                return Change()
            heard = self._fleet.last(node)
            interval_s = heard.interval_s if heard is not None else 0.0
            check_s = self._settings.check_s
            made.append(asked(node, "idle", FAULT, SERVER, IDLE_REASON, interval_s, now_s, sdc_s=check_s))
            return Change(node_checks=(made[0],))

        self._store.update(change)
        self._open.update((check.id, RequestedCheck(node, now_s)) for check in made)
        return bool(made)
