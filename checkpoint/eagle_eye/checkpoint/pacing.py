"""Decides how much of a copy to send now, or how long to wait, to avoid training's traffic. Pure.

After Gemini (SOSP 2023, section 5): a piece takes a + bytes/B, and only a part of an idle span is used.
"""

from __future__ import annotations

from eagle_eye.checkpoint.idle_spans import LinkState

MARGIN_RATIO = 0.85  # of an idle span that is used; the rest is for steps that are shorter than the ones before
PIECE_S = 0.02  # the longest piece where it is known when the span ends: what comes too early waits for so much
BLIND_PIECE_S = 0.005  # the longest where that is not known
PIECE_BYTES_MIN = 64 << 10  # what is shorter waits for the next span, unless nothing else is left
POLL_S = 0.005
FORGET_RATIO = 0.9  # of what the pieces before have said, with each piece
FIRST_DELAY_S, FIRST_BYTES_PER_S = 0.0005, 50e6  # until something is measured
B_RATIO_MIN = 0.01  # of a piece's time that its bytes take: for less, chance is taken for a
GROWTH_MAX = 2.0
BURST_S = 0.02  # of its rate that a cap lets pass at once


class Cost:
    """What a piece costs: ``delay_s`` (a) and ``bytes_per_s`` (B), by least squares over the newest pieces."""

    def __init__(self) -> None:
        self.delay_s, self.bytes_per_s = FIRST_DELAY_S, FIRST_BYTES_PER_S
        self._sums: tuple[float, ...] = (0.0,) * 5  # of 1, x, y, x², xy; see ``measured``
        self._largest = FIRST_BYTES_PER_S * BLIND_PIECE_S

    def seconds(self, count: int) -> float:
        """Return how long a piece of so many bytes takes."""
        return self.delay_s + count / self.bytes_per_s

    def bytes_within(self, seconds: float) -> int:
        """Return how many bytes a piece may have that takes so long; at most twice the longest that was measured."""
        return max(0, int(min((seconds - self.delay_s) * self.bytes_per_s, self._largest * GROWTH_MAX)))

    def measured(self, count: int, seconds: float) -> None:
        """A piece of so many bytes took so long, and had the link for itself. Shorter ones say too little of B."""
        if count < PIECE_BYTES_MIN or seconds <= 0:
            return
        self._largest = max(self._largest, float(count))
        x, y = 1.0 / count, seconds / count  # y = a x + 1/B: so pieces of all lengths count alike
        self._sums = tuple(
            old * FORGET_RATIO + new for old, new in zip(self._sums, (1.0, x, y, x * x, x * y), strict=True)
        )
        mean_x, mean_y, mean_xx, mean_xy = (one / self._sums[0] for one in self._sums[1:])
        variance, delay_s = mean_xx - mean_x * mean_x, 0.0
        if variance > (0.05 * mean_x) ** 2:  # else they are too much alike to say which part of their time is a
            delay_s = max(0.0, (mean_xy - mean_x * mean_y) / variance)
        if mean_y - delay_s * mean_x < B_RATIO_MIN * mean_y:
            delay_s = 0.0
        self.delay_s, self.bytes_per_s = delay_s, 1.0 / (mean_y - delay_s * mean_x)


class Cap:
    """The most that all copies of a store may take of the network: a bucket of tokens. None: no limit."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._burst = 0.0 if bytes_per_s is None else max(float(PIECE_BYTES_MIN), bytes_per_s * BURST_S)
        self._tokens = self._burst
        self._at_s: float | None = None

    def allowed_bytes(self, now_s: float) -> int | None:
        """Return how many bytes may go now, None for any number."""
        if self.bytes_per_s is None:
            return None
        passed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._tokens = min(self._burst, self._tokens + passed_s * self.bytes_per_s)
        self._at_s = now_s
        return max(0, int(self._tokens))

    def take(self, count: int) -> None:
        """So many bytes go."""
        self._tokens -= count

    def wait_s(self, count: int) -> float:
        """Return how long it takes until so many bytes may go."""
        missing = min(float(count), self._burst) - self._tokens
        return 0.0 if self.bytes_per_s is None else max(0.0, missing / self.bytes_per_s)


def next_piece(now_s: float, sight: LinkState | None, left: int, cost: Cost, cap: Cap) -> tuple[int, float]:
    """Return how many of the bytes that are left go now, and how long to wait where it is none.

    Without a ``sight`` of the link (None) the cap alone decides.
    """
    least, wait_s = min(left, PIECE_BYTES_MIN), POLL_S
    if sight is None:
        count = max(least, min(left, cost.bytes_within(PIECE_S)))
    elif sight.busy:
        return 0, wait_s
    elif sight.ends_s is None:
        count = max(least, min(left, cost.bytes_within(BLIND_PIECE_S)))
    else:
        room_s = sight.began_s + MARGIN_RATIO * (sight.ends_s - sight.began_s) - now_s
        count = min(left, cost.bytes_within(min(room_s, PIECE_S)))
        if count < least:
            return 0, max(wait_s, sight.ends_s - now_s)
    allowed = cap.allowed_bytes(now_s)
    if allowed is not None:
        if allowed < least:
            return 0, cap.wait_s(least)
        count = min(count, allowed)
    return count, 0.0
