"""Detects others' traffic on a link, from the interface's sent bytes minus our own. Pure."""

from __future__ import annotations

from eagle_eye.checkpoint.idle_spans import IdleSpans

LOOK_S_MIN = 0.001  # a rate over less is noise: the kernel counts segments of 64 KiB at once
QUIET_S = 0.004  # a collective's pauses between its rounds are shorter
BUSY_BYTES = 16 << 10  # heartbeats and control messages are shorter
BUSY_RATIO = 0.1  # of the link's highest rate: acknowledgements of received data take a fortieth
OWN_RATIO = 1.15  # headers are a twentieth of what is sent, and some is retransmitted
RATE_OVER_S = 0.01
PEAK_HALVES_S = 60.0


class Carrier:
    """Reports to ``spans`` when others' traffic starts and stops. ``total`` counts all bytes sent by the interface."""

    def __init__(self, spans: IdleSpans) -> None:
        self._spans = spans
        self._busy_until_s: float | None = None
        self._looked_s: float | None = None
        self._total = 0
        self._rate = 0.0
        self.peak_bytes_per_s = 0.0
        self.collisions = 0

    def look(self, now_s: float, total: int) -> None:
        """Take the sent bytes so far; none since the last look were our own."""
        if self._looked_s is None or total < self._total:  # first, or the interface was recreated
            self._looked_s, self._total = now_s, total
        elif now_s - self._looked_s >= LOOK_S_MIN:
            self._passed(now_s, total, 0)

    def sent(self, now_s: float, total: int, own_bytes: int) -> bool:
        """Take the sent bytes so far and how many were our own; return whether others sent, too."""
        if self._looked_s is None or total < self._total or now_s <= self._looked_s:
            self._looked_s, self._total = now_s, total
            return False
        others = self._passed(now_s, total, own_bytes)
        self.collisions += others
        return others

    def _passed(self, now_s: float, total: int, own_bytes: int) -> bool:
        began_s = self._looked_s if self._looked_s is not None else now_s
        lasted_s, moved = now_s - began_s, total - self._total
        self._looked_s, self._total = now_s, total
        self._rate += (moved / lasted_s - self._rate) * min(1.0, lasted_s / RATE_OVER_S)
        self.peak_bytes_per_s = max(self._rate, self.peak_bytes_per_s * 0.5 ** (lasted_s / PEAK_HALVES_S))
        others = moved - own_bytes * OWN_RATIO
        if others >= BUSY_BYTES and others >= BUSY_RATIO * self.peak_bytes_per_s * lasted_s:
            if self._busy_until_s is None:
                # Possibly not read for a while: at the highest rate the traffic began this long ago.
                self._spans.busy(max(began_s, now_s - others / self.peak_bytes_per_s))
            self._busy_until_s = now_s
            return True
        if self._busy_until_s is not None and now_s - self._busy_until_s >= QUIET_S:
            self._spans.idle(self._busy_until_s)
            self._busy_until_s = None
        return False
