"""Combines one or more series into one metric of one row, for each timestamp. Pure.

A node's series reach the server in several requests, over connections of different speed. The value for a timestamp is
complete once every participating series has a sample for it: a sum without one of its ports would look like a drop. A
series that ended (a stale marker), or sent nothing for MEMBER_GONE_S while others did, no longer participates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from eagle_eye.server.ingest.remote_write.mapping import Rule, Use

MEMBER_GONE_S = 300.0  # five scrapes a minute apart
RATE_GAP_S_MAX = 600.0  # a rate over a longer gap says nothing about its timestamp
WAITING_MAX = 4  # concurrent timestamps waiting for their last series

Identity = tuple[int, tuple[str, ...]]  # of a series in a cell: the index of its origin in the rule, and its own labels


@dataclass(slots=True, eq=False)
class Member:
    """One series' part in a cell.

    Its last sample was at ``time_s``; the last with a value was ``reading`` at ``read_s``. ``width`` is the size of the
    group that the series describes, if its rule needs it.
    """

    cell: Cell
    use: Use
    identity: Identity
    width: float = 0.0
    time_s: float = -math.inf
    read_s: float = -math.inf
    reading: float = math.nan
    first: float = 0.0  # part of a total that existed before the member joined


@dataclass(slots=True, eq=False)
class Cell:
    """The value of one metric in one row. ``born_s`` is the timestamp of its first sample."""

    rule: Rule
    is_total: bool
    members: dict[Identity, Member] = field(default_factory=dict)
    born_s: float = math.inf
    _newest_s: float = -math.inf
    _open: dict[float, dict[Identity, float]] = field(default_factory=dict)

    def member(self, use: Use, labels: tuple[str, ...]) -> Member:
        """Return the part of the series with these labels of ``rule.each``, creating one if needed."""
        identity = (use.order, labels)
        return self.members.get(identity) or Member(self, use, identity)

    def take(self, member: Member, time_s: float, reading: float) -> float | None:
        """Add a series' sample (NaN: no value); return the cell's value if it is complete now.

        The timestamp is later than the member's last.
        """
        if member.identity not in self.members:
            if self.is_total and member.time_s == -math.inf and time_s > self.born_s and not math.isnan(reading):
                member.first = reading
            self.members[member.identity] = member
        self.born_s = min(self.born_s, time_s)
        part = _part(member, time_s, reading)
        member.time_s = time_s
        if not math.isnan(reading):
            member.read_s, member.reading = time_s, reading
        parts = self._open.get(time_s)
        if parts is None:
            parts = self._begin(time_s)
        parts[member.identity] = part
        if len(parts) < len(self.members) or (self._many and time_s == self.born_s):
            return None
        del self._open[time_s]
        return self._value(parts)

    def end(self, member: Member) -> None:
        """Record that the series has ended."""
        self.members.pop(member.identity, None)
        member.reading = math.nan

    @property
    def _many(self) -> bool:
        """Whether more than one series may participate; their number is unknown at first."""
        return bool(self.rule.each) or len(self.rule.origins) > 1

    def _begin(self, time_s: float) -> dict[Identity, float]:
        if len(self._open) >= WAITING_MAX:
            del self._open[min(self._open)]
        # Measured by timestamps of other series: after an outage all series were silent.
        gone = [key for key, member in self.members.items() if self._newest_s - member.time_s > MEMBER_GONE_S]
        for key in gone:
            del self.members[key]
        self._newest_s = max(self._newest_s, time_s)
        parts = self._open[time_s] = {}
        return parts

    def _value(self, parts: dict[Identity, float]) -> float | None:
        value = self._combined({key: part for key, part in parts.items() if not math.isnan(part)}, len(parts))
        if value is None:
            return None
        if self.rule.complement:
            value = 1.0 - value
        if self.rule.equals:
            return float(value in self.rule.equals)
        if self.rule.most == 1.0 and any(origin.rate for origin in self.rule.origins):
            return min(1.0, max(0.0, value))  # scrapes and counters are read at slightly different times
        return value

    def _combined(self, parts: dict[Identity, float], asked: int) -> float | None:
        """Return the combined parts; None if incomplete. ``asked`` series were to participate."""
        rule = self.rule
        if not parts:
            return None
        if rule.combine == "first":
            return parts[min(parts)]
        if rule.combine == "max":
            return max(parts.values())
        if len(parts) < asked:
            return None
        if rule.combine == "widest":
            return _widest(self.members, parts)
        if rule.combine == "ratio":
            over = sum(part for (order, _), part in parts.items() if rule.origins[order].over)
            above = sum(part for (order, _), part in parts.items() if not rule.origins[order].over)
            both = len({order for order, _ in parts}) == len(rule.origins)
            return above / over if both and over > 0.0 else None
        total = sum(parts.values())
        if rule.per:
            place = rule.each.index(rule.per)
            total /= len({labels[place] for _, labels in parts})
        return total


def _part(member: Member, time_s: float, reading: float) -> float:
    """Return what a reading adds to its cell; NaN if undefined: the first of a rate, or a counter reset."""
    origin = member.use.origin
    if not origin.rate:
        return (reading - member.first) * origin.factor
    grown, elapsed_s = reading - member.reading, time_s - member.read_s
    if not grown >= 0.0 or not elapsed_s <= RATE_GAP_S_MAX:
        return math.nan
    return grown / elapsed_s * origin.factor


def _widest(members: dict[Identity, Member], parts: dict[Identity, float]) -> float:
    """Return the mean over the series of the widest group; width is 0 where a series does not report it."""
    widths = {key: members[key].width for key in parts}
    widest = max(widths.values())
    chosen = [parts[key] for key, width in widths.items() if width == widest]
    return sum(chosen) / len(chosen)
