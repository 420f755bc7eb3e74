"""Tells subscribers the epoch of a server that begins to lead: what the one before has under way is refused then."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence

from eagle_eye.server.delivery import events
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.records import Delivery
from eagle_eye.server.store.changes import Signal, wait
from eagle_eye.server.store.store import DELIVERIES, PAGE_LIMIT_MAX, SUBSCRIPTIONS, Change, Store
from eagle_eye.server.telemetry.counters import Telemetry

WITHIN_RATIO = 0.5  # of a lease, for which nothing is judged where a subscriber does not answer
RECORDS_PAUSE_S = 1.0  # between tries while the records cannot be used
REFUSED_FOR_EPOCH = 409  # of a delivery that is pending; other refusals with this status are final
NAMED_MAX = 10  # subscriptions in one line of the log

_log = logging.getLogger(__name__)


class LeaderPing:
    """One ping to each subscription whose events have an epoch; the outbox delivers it, and repeats it."""

    def __init__(
        self,
        store: Store,
        signal: Signal,
        clock: Clock,
        telemetry: Telemetry,
        lease_s: float,
        waiting: Callable[[asyncio.Event, float], Awaitable[bool]] = wait,
    ) -> None:
        self._store = store
        self._signal = signal
        self._clock = clock
        self._telemetry = telemetry
        self._within_s = WITHIN_RATIO * lease_s
        self._waiting = waiting
        self._over = False

    async def sent(self) -> None:
        """Return once each subscriber has answered or cannot be reached, after half a lease at the latest.

        While the records cannot be used it waits for them: nothing can be judged either. Later calls return at once.
        """
        if self._over:
            return
        woken = self._signal.waiter()
        try:
            pings = await self._committed()
            began_s = self._clock.monotonic_s()
            tried: dict[str, Delivery] = {}
            while len(tried) < len(pings):
                tried |= await asyncio.to_thread(self._tried, [ping for ping in pings if ping not in tried])
                left_s = began_s + self._within_s - self._clock.monotonic_s()
                if left_s <= 0.0:
                    break
                if len(tried) < len(pings):
                    await self._waiting(woken, left_s)
        finally:
            self._signal.forget(woken)
        self._over = True
        self._note(pings, tried, self._clock.monotonic_s() - began_s)

    async def _committed(self) -> dict[str, str]:
        """Have the outbox deliver the pings; return each one's subscription."""
        while True:
            try:
                return await asyncio.to_thread(self._commit)
            except StoreUnavailable as error:
                _log.warning("subscribers cannot be told who leads yet", extra={"error": str(error)})
                await asyncio.sleep(RECORDS_PAUSE_S)

    def _commit(self) -> dict[str, str]:
        now_s = self._clock.now_s()
        asked = [one for one in self._store.all(SUBSCRIPTIONS) if one.active and one.format == "cloudevents"]
        pings = tuple(events.ping(one, secrets.token_hex(8), now_s) for one in asked)
        if pings:
            self._store.commit(Change(events=pings))
        return {ping.id: ping.subject for ping in pings}

    def _tried(self, pings: Sequence[str]) -> dict[str, Delivery]:
        """Return those of the pings of which an attempt has ended; one that was refused for its epoch is repeated."""
        try:
            found = self._store.page(DELIVERIES, {"event_id": pings[:PAGE_LIMIT_MAX]}, limit=PAGE_LIMIT_MAX).items
        except StoreUnavailable:
            return {}
        return {
            one.event_id: one
            for one in found
            if one.state != "pending" or (one.attempts and one.last_status != REFUSED_FOR_EPOCH)
        }

    def _note(self, pings: dict[str, str], tried: dict[str, Delivery], took_s: float) -> None:
        answered = [ping for ping, delivery in tried.items() if delivery.state == "delivered"]
        counts = {
            "answered": len(answered),
            "failed": len(tried) - len(answered),
            "no_answer": len(pings) - len(tried),
        }
        for outcome, count in counts.items():
            self._telemetry.leader_pings.labels(outcome).inc(count)
        said = {**counts, "took_s": round(took_s, 3)}
        if len(answered) == len(pings):
            _log.info("subscribers were told who leads", extra=said)
            return
        untold = [name for ping, name in pings.items() if ping not in answered]
        named = ", ".join(untold[:NAMED_MAX]) + (f" and {len(untold) - NAMED_MAX} more" * (len(untold) > NAMED_MAX))
        _log.warning(
            "it is judged though not all subscribers could be told who leads; the pings are repeated",
            extra={**said, "subscriptions": named},
        )
