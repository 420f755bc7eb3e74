"""Asks idle nodes to look for silent corruption between jobs, within the site's budget. Writes the store.

Beside the detection loop, as the accounts: the event loop only hands over what it has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from eagle_eye.server.clock import Clock
from eagle_eye.server.engine.idle_checks import WEEK_S, Asked, IdleCheckSettings, due
from eagle_eye.server.engine.idle_faults import FAULT, NO_JOB
from eagle_eye.server.errors import StoreUnavailable
from eagle_eye.server.fleet import Fleet
from eagle_eye.server.node_checks import OPEN_STATES, SERVER, asked, offer_of, under_way
from eagle_eye.server.records import AuditEntry, Node, NodeCheck
from eagle_eye.server.store import NODE_CHECKS, NODES, OVER_JOB_STATES, PAGE_LIMIT_MAX, Change, Store
from eagle_eye.server.watching import Course

LOOK_S = 30.0
REASON = "it has no job (idle_checks)"

_log = logging.getLogger(__name__)


class IdleChecks:
    """Nothing is asked while the settings give no time for it. The store is the memory of what was asked."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        fleet: Fleet,
        settings: IdleCheckSettings,
        courses: Callable[[], Iterable[Course]],
    ) -> None:
        """``courses()`` returns the jobs that are watched; called on the event loop."""
        self._store = store
        self._clock = clock
        self._fleet = fleet
        self._settings = settings
        self._courses = courses
        self._idle_since_s: dict[str, float] = {}
        self._asked: dict[str, NodeCheck] | None = None  # by id, those of the last week

    async def run(self) -> None:
        """Look at the fleet every LOOK_S until cancelled."""
        while self._settings.weekly_budget_s > 0:
            await asyncio.sleep(LOOK_S)
            busy = {node for c in self._courses() if c.state not in OVER_JOB_STATES for node in c.nodes}
            try:
                await asyncio.to_thread(self.look, busy)
            except StoreUnavailable:
                _log.warning("idle nodes are not checked: the records cannot be read or written")
        await asyncio.Event().wait()

    def look(self, busy: Iterable[str]) -> list[str]:
        """Ask those idle nodes whose turn it is; return them. ``busy`` are the nodes of jobs that are not over.

        Raises StoreUnavailable.
        """
        now_s = self._clock.now_s()
        before = self._idle_since_s
        idle = self._idle(frozenset(busy), now_s)
        self._idle_since_s = {node: min(before.get(node, now_s), now_s) for node in idle}
        known = self._asked_lately(now_s)
        history = [
            Asked(check.node, check.created_s, check.state in OPEN_STATES or check.began_s is not None)
            for check in known.values()
        ]
        open_checks = sum(check.state in OPEN_STATES for check in known.values())
        return [
            node
            for node in due(self._idle_since_s, history, open_checks, self._settings, now_s)
            if self._ask(node, now_s)
        ]

    def _idle(self, busy: frozenset[str], now_s: float) -> list[str]:
        """Return the nodes in service that work for nobody, by agents, launchers and schedulers, and can be asked."""
        suspects = {one.node for one in self._store.open_incidents() if one.job == NO_JOB}
        return [
            node.node
            for node in self._store.all(NODES)
            if node.node not in busy and node.node not in suspects and self._is_idle(node, now_s)
        ]

    def _is_idle(self, node: Node, now_s: float) -> bool:
        heard = self._fleet.last(node.node)
        if node.state != "in_service" or heard is None or heard.job or heard.ranks:
            return False
        return offer_of(self._fleet, node.node, now_s).state == "ready"

    def _asked_lately(self, now_s: float) -> Mapping[str, NodeCheck]:
        """Return what was asked for by this in the last week; what was open is read anew."""
        if self._asked is None:
            self._asked = {check.id: check for check in self._of_the_week(now_s)}
        for id_, check in list(self._asked.items()):
            newer = self._store.get(NODE_CHECKS, id_) if check.state in OPEN_STATES else check
            if newer is None or now_s - newer.created_s >= WEEK_S:
                del self._asked[id_]
            else:
                self._asked[id_] = newer
        return self._asked

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
        """Ask the node, unless somebody has taken it out, or looks at it, meanwhile; return whether it was asked."""
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
            entry = AuditEntry(time_s=now_s, who=SERVER, verb="check", subject=node, detail=f"{made[0].id}: {REASON}")
            return Change(node_checks=(made[0],), audit=(entry,))

        self._store.update(change)
        if made:
            assert self._asked is not None  # noqa: S101 - read before anybody is asked
            self._asked[made[0].id] = made[0]
        return bool(made)
