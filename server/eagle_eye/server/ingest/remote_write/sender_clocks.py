"""Estimates how far remote writers' clocks are ahead, as requests carry sample times but no sending time.

Pure. A request's newest samples are normally some seconds old; if they are later than its receipt, the sender's clock
is ahead. A clock that is behind cannot be distinguished from a late request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from eagle_eye.server.ingest.remote_write.wire import WireSeries
from eagle_eye.server.model.clock import AHEAD_S_MAX

LOOKED_AT = 64  # series per request: a few exporters with times of their own do not outvote the others
LAG_S_MAX = 10.0  # of a sender's promptest request in a minute
SET_BACK_S = 30.0  # a larger lag comes from a clock that was set, or an outage, and needs no correction
WATCHED_S = 60.0
SENDERS_MAX = 1_024


@dataclass(slots=True)
class _Sender:
    offset_s: float
    since_s: float  # start of the observation
    lag_s: float = float("inf")  # the minimum since then


class SenderClocks:
    """What to add to each sender's times: 0.0, or less where its clock is ahead."""

    def __init__(self) -> None:
        self._senders: dict[str, _Sender] = {}

    def offset_s(self, sender: str, series: Sequence[WireSeries], received_s: float) -> float:
        """Take a request's series; return what to add to their samples' times."""
        every = max(len(series) // LOOKED_AT, 1)
        times_ms = [one.samples[-1].time_ms for one in series[::every] if one.samples]
        if not times_ms:
            return 0.0
        newest_s = median_low(times_ms) / 1000.0
        known = self._senders.get(sender)
        if newest_s > received_s + AHEAD_S_MAX + (0.0 if known is None else -known.offset_s):
            while len(self._senders) >= SENDERS_MAX:
                del self._senders[next(iter(self._senders))]
            self._senders[sender] = _Sender(received_s - newest_s, received_s)
            return received_s - newest_s
        if known is None:
            return 0.0
        lag_s = received_s - newest_s - known.offset_s
        known.lag_s = min(known.lag_s, lag_s)
        over = received_s - known.since_s >= WATCHED_S
        if lag_s > SET_BACK_S or (over and known.lag_s > LAG_S_MAX):
            del self._senders[sender]
            return self.offset_s(sender, series, received_s)
        if over:
            known.since_s, known.lag_s = received_s, lag_s
        return known.offset_s
