"""Chooses which deliveries to one subscription may start beside those in flight. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eagle_eye.server.store.store import Due

ACTION_PLACES = 4  # reserved for requests to act, beside webhooks.concurrency_per_subscription


class InFlight:
    """Deliveries in flight to one subscription: at most ``usual``, and ``ACTION_PLACES`` more of urgent ones.

    One that hangs occupies its place and delays its incident's later events; nothing else waits for it.
    """

    def __init__(self, usual: int) -> None:
        self._usual = usual
        self._under_way: dict[str, Due] = {}
        self._ended: set[str] = set()
        self._refreshed: frozenset[str] = frozenset()
        self.refreshing = False

    @property
    def busy(self) -> bool:
        """Whether any delivery or refresh is in flight."""
        return self.refreshing or bool(self._under_way)

    @property
    def groups(self) -> frozenset[str]:
        """The incidents that have a delivery in flight."""
        return frozenset(due.delivery.group for due in self._under_way.values())

    @property
    def ask_max(self) -> int:
        """How many due deliveries to fetch, so that those in flight or waiting hide no others."""
        return len(self._under_way) + len(self._refreshed) + self._usual + ACTION_PLACES

    def start(self, due: Sequence[Due]) -> list[Due]:
        """Return those of the due deliveries, urgent ones first, that start now; they are in flight from here on."""
        started = []
        for one in sorted(due, key=lambda one: not one.urgent):
            if one.delivery.id in self._under_way or one.delivery.group in self._refreshed:
                continue
            if self._room(one.urgent):
                self._under_way[one.delivery.id] = one
                started.append(one)
        return started

    def end(self, delivery_id: str) -> None:
        """Record that an attempt is over; its place is free after the next ``clear_ended``."""
        self._ended.add(delivery_id)

    def clear_ended(self) -> None:
        """Free the places of attempts that are over.

        Call it before querying the store for due deliveries: an attempt that ends between query and answer is still
        pending in the answer, and would be made twice.
        """
        for delivery_id in self._ended:
            del self._under_way[delivery_id]
        self._ended.clear()

    def start_refresh(self, incidents: Iterable[str]) -> None:
        """Hold back deliveries of these incidents until ``end_refresh``: the refresh must not undo them."""
        self.refreshing = True
        self._refreshed = frozenset(incidents)

    def end_refresh(self) -> None:
        """Release the deliveries that the refresh held back."""
        self.refreshing = False
        self._refreshed = frozenset()

    def _room(self, urgent: bool) -> bool:
        if len(self._under_way) >= self._usual + ACTION_PLACES:
            return False
        return urgent or sum(not due.urgent for due in self._under_way.values()) < self._usual
