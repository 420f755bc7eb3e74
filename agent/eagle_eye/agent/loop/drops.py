"""Counts what the agent had to drop, by reason, so that no loss is silent."""

from __future__ import annotations

import threading

REASONS_MAX = 256  # ours are below a hundred; a server may invent reasons for what it rejects
OTHER_REASONS = "other_reasons"


class Drops:
    """Drop counts since the agent started, by a stable reason; thread-safe.

    Beyond REASONS_MAX different reasons, further ones are counted as OTHER_REASONS.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def count(self, reason: str, times: int = 1) -> None:
        """Add ``times`` to a reason."""
        if times > 0:
            with self._lock:
                if reason not in self._counts and len(self._counts) >= REASONS_MAX:
                    reason = OTHER_REASONS
                self._counts[reason] = self._counts.get(reason, 0) + times

    def snapshot(self) -> dict[str, int]:
        """Return a copy of the counts."""
        with self._lock:
            return dict(self._counts)
