"""Persistent state of remote write: the devices in a node's series, and their last error codes."""

from __future__ import annotations

import msgspec


class Watched(msgspec.Struct, frozen=True):
    """A device with samples since ``since_s``; ``code`` is the value of its last-error gauge.

    ``time_s`` is when that value was first seen; both None: no such gauge was seen. Unix seconds of the samples.
    ``gauges`` has the same of gauges that state other facts, by name: when its value was first seen, and the value.
    ``uuid`` is the GPU's, "" if its series do not say: what was seen of one GPU says nothing about another.
    """

    since_s: float
    time_s: float | None = None
    code: float | None = None
    uuid: str = ""
    gauges: dict[str, tuple[float, float]] = {}

    def last(self, gauge: str) -> tuple[float | None, float | None]:
        """Return when the gauge's last value was first seen, and the value; "": the last-error gauge."""
        return self.gauges.get(gauge, (None, None)) if gauge else (self.time_s, self.code)


class LastCodes(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of one node."""

    node: str
    devices: dict[int, Watched] = {}
