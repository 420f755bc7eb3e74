"""Counts and logs node clock steps and implausible timestamps, and reports them for an hour as node troubles."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

SAID_S = 3600.0  # how long a node's troubles mention it
LOG_NODE_S = 600.0  # minimum time between two log lines about one node
LOG_PER_MINUTE = 20  # lines: when the server's own clock is set, every node's clock appears to be

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Noted:
    set_s: float = float("-inf")
    set_by_s: float = 0.0
    reported: bool = False
    moved_s: float = float("-inf")
    moved: int = 0
    logged_s: float = float("-inf")


class ClockNotes:
    """Clock steps and moved timestamps per node.

    ``steps`` counts clock steps by who detected them; ``moved`` counts moved timestamps by what carried them.
    """

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter({"agent": 0, "server": 0})
        self.moved: Counter[str] = Counter({"frame": 0, "event": 0, "sample": 0})
        self._noted: dict[str, _Noted] = {}
        self._minute_s = float("-inf")
        self._logged = 0

    def note_set(self, node: str, by_s: float, now_s: float, *, reported: bool) -> None:
        """Record that a node's clock was set by ``by_s``; ``reported`` means that the agent reported it."""
        self.steps["agent" if reported else "server"] += 1
        noted = self._noted.setdefault(node, _Noted())
        noted.set_s, noted.set_by_s, noted.reported = now_s, by_s, reported
        self._say(node, noted, now_s)

    def note_moved(self, node: str, what: str, count: int, now_s: float) -> None:
        """Record that ``count`` timestamps of a node were implausible and were moved."""
        if not count:
            return
        self.moved[what] += count
        noted = self._noted.setdefault(node, _Noted())
        noted.moved = count if now_s - noted.moved_s > SAID_S else noted.moved + count
        noted.moved_s = now_s
        self._say(node, noted, now_s)

    def said(self, node: str, now_s: float) -> str | None:
        """Describe what happened to a node's clock in the last hour; None if nothing did."""
        noted = self._noted.get(node)
        return None if noted is None else _said(noted, now_s)

    def _say(self, node: str, noted: _Noted, now_s: float) -> None:
        if abs(now_s - self._minute_s) >= 60.0:
            self._minute_s, self._logged = now_s, 0
        if abs(now_s - noted.logged_s) < LOG_NODE_S or self._logged >= LOG_PER_MINUTE:
            return
        noted.logged_s = now_s
        self._logged += 1
        _log.warning("node %s: %s", node, _said(noted, now_s))


def _said(noted: _Noted, now_s: float) -> str | None:
    parts: list[str] = []
    if now_s - noted.set_s <= SAID_S:
        who = "the agent says so" if noted.reported else "seen by what it sends"
        parts.append(f"its clock was set by {noted.set_by_s:+.1f} s ({who})")
    if now_s - noted.moved_s <= SAID_S:
        parts.append(f"{noted.moved} times that it sent cannot be and were moved to when they came")
    return "; ".join(parts) or None
