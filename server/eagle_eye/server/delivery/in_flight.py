"""Which deliveries to one subscription may start beside those that are under way. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eagle_eye.server.store.store import Due

ACTION_PLACES = 4  # kept for requests to act, beside webhooks.concurrency_per_subscription


class InFlight:
    """Deliveries under way to one subscription: at most ``usual``, and ``ACTION_PLACES`` more of urgent ones.

    One that hangs keeps its place and its incident's later events; nothing else waits for it.
    """

    def __init__(self, usual: int) -> None:
        self._usual = usual
        self._under_way: dict[str, Due] = {}
        self._ended: set[str] = set()
        self._refreshed: frozenset[str] = frozenset()
        self.refreshing = False

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return self.refreshing or bool(self._under_way)

    @property
    def groups(self) -> frozenset[str]:
        """The incidents that a delivery is under way of."""
        return frozenset(due.delivery.group for due in self._under_way.values())

    @property
    def ask_max(self) -> int:
        """How many due deliveries to look at, so that those under way and those that wait hide no other."""
        return len(self._under_way) + len(self._refreshed) + self._usual + ACTION_PLACES

    def start(self, due: Sequence[Due]) -> list[Due]:
        """Return those of the due deliveries, urgent ones first, that start now; they are under way from here on."""
        started = []
        for one in sorted(due, key=lambda one: not one.urgent):
            if one.delivery.id in self._under_way or one.delivery.group in self._refreshed:
                continue
            if self._room(one.urgent):
                self._under_way[one.delivery.id] = one
                started.append(one)
        return started

    def end(self, delivery_id: str) -> None:
        """Note that an attempt is over; its place is free after the next ``clear_ended``."""
        self._ended.add(delivery_id)

    def clear_ended(self) -> None:
        """Free the places of attempts that are over.

        To be called before the store is asked what is due: an attempt that ends between question and answer is still
        pending in the answer, and would be made twice.
        """
        for delivery_id in self._ended:
            del self._under_way[delivery_id]
        self._ended.clear()

    def start_refresh(self, incidents: Iterable[str]) -> None:
        """Have deliveries of these incidents wait until ``end_refresh``; it must not undo what they say."""
        self.refreshing = True
        self._refreshed = frozenset(incidents)

    def end_refresh(self) -> None:
        """Let the deliveries go on that the refresh kept back."""
        self.refreshing = False
        self._refreshed = frozenset()

    def _room(self, urgent: bool) -> bool:
        if len(self._under_way) >= self._usual + ACTION_PLACES:
            return False
        return urgent or sum(not due.urgent for due in self._under_way.values()) < self._usual
