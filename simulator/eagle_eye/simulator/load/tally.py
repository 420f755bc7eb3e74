"""The load test's results: counts, and acknowledgement latencies."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

BUCKETS_PER_DOUBLING = 16  # a quantile is known to 4.4%
SHORTEST_S = 1e-4
BUCKETS = 26 * BUCKETS_PER_DOUBLING  # up to 6,700 s
PARTS_MAX, PART_S_MIN = 60, 10.0  # into which a run is divided, to tell a bad minute from a bad server


class LatencyHistogram:
    """A histogram of durations in exponential buckets; quantiles are upper bounds of their buckets."""

    def __init__(self) -> None:
        self._counts = [0] * BUCKETS
        self.count = 0
        self.max_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        bucket = int(math.log2(seconds / SHORTEST_S) * BUCKETS_PER_DOUBLING) + 1 if seconds > SHORTEST_S else 0
        self._counts[min(bucket, BUCKETS - 1)] += 1
        self.count += 1
        self.max_s = max(self.max_s, seconds)

    def quantile_s(self, share: float) -> float | None:
        """Return the duration that ``share`` of all did not exceed; None: there were none."""
        if self.count == 0:
            return None
        wanted = share * self.count
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if seen >= wanted:
                return min(SHORTEST_S * math.exp2(bucket / BUCKETS_PER_DOUBLING), self.max_s)
        return self.max_s

    def figures(self) -> dict[str, float | None]:
        """Return quantiles and maximum in seconds; None: there were none."""
        quantiles = {name: self.quantile_s(share) for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))}
        return {**quantiles, "max": self.max_s if self.count else None}


class Tally:
    """Counts of frames and samples, each frame in one of: acknowledged, refused, given up, dropped, waiting.

    ``made`` and ``acknowledged`` count frames, ``samples_*`` their numbers. ``refused``: the server will never take it
    (400, 413, 422). ``dropped``: it was pushed out of a full queue. ``latencies`` run from the moment at which a frame
    was due, not from that at which it could be sent.
    """

    def __init__(self) -> None:
        self.made = 0
        self.samples_made = 0
        self.acknowledged = 0
        self.samples_acknowledged = 0
        self.refused = 0
        self.dropped = 0
        self.duplicates = 0  # frames that the server had already when they were sent again
        self.requests = 0
        self.bytes_sent = 0
        self.late_sends = 0  # frames that this program itself sent later than LATE_SEND_S after they were due
        self.asked_to_wait: Counter[str] = Counter()  # by status and reason: what was sent again later
        self.errors: Counter[str] = Counter()
        self.said: dict[str, str] = {}  # the first detail of each kind of refusal
        self.latencies = LatencyHistogram()
        self.settled_s = -math.inf  # frames due from then on, by the event loop's clock, count in ``settled`` too
        self.settled = LatencyHistogram()
        self.goodbye_s = math.inf  # those due from then on are goodbyes: all nodes at once, counted apart
        self.goodbyes = LatencyHistogram()
        self._parts: list[LatencyHistogram] = []
        self._begin_s, self._part_s = 0.0, PART_S_MIN

    def divide(self, begin_s: float, duration_s: float) -> None:
        """Tell the parts of a run from each other that begins at ``begin_s`` by the event loop's clock."""
        self._begin_s, self._part_s = begin_s, max(PART_S_MIN, duration_s / PARTS_MAX)
        self._parts = [LatencyHistogram() for _ in range(math.ceil(duration_s / self._part_s - 1e-9))]

    def acknowledge(self, samples: int, due_s: float, now_s: float) -> None:
        """Count a frame that is durable; times by the event loop's clock."""
        self.acknowledged += 1
        self.samples_acknowledged += samples
        if due_s >= self.goodbye_s:
            self.goodbyes.add(now_s - due_s)
            return
        self.latencies.add(now_s - due_s)
        if due_s >= self.settled_s:
            self.settled.add(now_s - due_s)
        if self._parts:
            part = int((due_s - self._begin_s) / self._part_s)
            self._parts[min(max(part, 0), len(self._parts) - 1)].add(now_s - due_s)

    @property
    def lost(self) -> int:
        """How many frames were made and not acknowledged, whatever became of them."""
        return self.made - self.acknowledged

    def figures(self, seconds: float) -> dict[str, Any]:
        """Return all of it as plain JSON; ``seconds`` is how long frames were made."""
        return {
            "frames_sent": self.made,
            "frames_acknowledged": self.acknowledged,
            "frames_lost": self.lost,
            "samples_sent": self.samples_made,
            "samples_acknowledged": self.samples_acknowledged,
            "samples_per_second": self.samples_acknowledged / seconds if seconds > 0.0 else 0.0,
            "frames_refused": self.refused,
            "frames_dropped": self.dropped,
            "duplicates": self.duplicates,
            "requests": self.requests,
            "bytes_sent": self.bytes_sent,
            "sends_late": self.late_sends,
            "acknowledged_seconds": self.latencies.figures(),
            "acknowledged_seconds_settled": self.settled.figures(),
            "acknowledged_seconds_by_part": [
                {"from": at * self._part_s, **part.figures()} for at, part in enumerate(self._parts)
            ],
            "acknowledged_seconds_goodbye": self.goodbyes.figures(),
            "asked_to_wait": dict(self.asked_to_wait),
            "errors": dict(self.errors),
            "details": self.said,
        }
