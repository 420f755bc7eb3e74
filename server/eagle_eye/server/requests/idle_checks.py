"""Requests checks for silent data corruption on idle nodes, within the site's budget. Writes the store.

Like the accounts, it runs beside the detection loop, which only hands over its data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from eagle_eye.server.engine.idle_faults import FAULT, NO_JOB, WEEK_S, IdleCheckSettings, RequestedCheck, due
from eagle_eye.server.engine.settings import PolicySettings, in_force
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.records import Node, NodeCheck
from eagle_eye.server.monitor.watcher import JobProgress
from eagle_eye.server.requests.node_checks import OPEN_STATES, SERVER, asked, offer_of, under_way
from eagle_eye.server.store.periodic import repeat
from eagle_eye.server.store.store import NODE_CHECKS, NODES, OVER_JOB_STATES, PAGE_LIMIT_MAX, Change, Store

LOOK_S = 30.0
REASON = "it has no job (idle_checks)"


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
        interval_s = LOOK_S if self._settings.weekly_budget_s > 0 else 0.0
        await repeat(self._look_at_once, interval_s, "idle nodes are not checked", wait_first=True)

    async def _look_at_once(self) -> None:
        busy = {node for c in self._courses() if c.state not in OVER_JOB_STATES for node in c.nodes}
        await asyncio.to_thread(self.look, busy)

    def look(self, busy: Iterable[str]) -> list[str]:
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
            made.append(asked(node, "idle", FAULT, SERVER, REASON, interval_s, now_s, sdc_s=check_s))
            return Change(node_checks=(made[0],))

        self._store.update(change)
        self._open.update((check.id, RequestedCheck(node, now_s)) for check in made)
        return bool(made)
