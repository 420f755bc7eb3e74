"""Counts and reports fields of newer agents that this server does not know, and invalid names; all are ignored."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from eagle_eye.server.telemetry.counters import Telemetry

LOGGED_MAX = 256  # distinct things named in the log: a hostile agent could invent more forever
ANSWERED_MAX = 32  # named in one answer: an agent reads 64 KiB of it

NONE = ("name ", "number ")  # invalid in every version: not a possible job name or rank
_NONE = "node %s (agent %r) sends an invalid name or number; it is left out and the rest is kept: %s"
_UNKNOWN = "node %s (agent %r) sends what this server does not know and leaves out, upgrade the server: %s"

_log = logging.getLogger(__name__)


class UnknownThings:
    """Counts unknown fields, and logs each once."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._named: set[str] = set()

    def note(self, node: str, agent_version: str, times: Mapping[str, int]) -> list[str]:
        """Count what was ignored in a node's frames, log what is new, and return names for the answer."""
        for name, count in times.items():
            self._telemetry.unknown.labels(name.partition(" ")[0]).inc(count)
        for name in times.keys() - self._named:
            if len(self._named) < LOGGED_MAX:
                self._named.add(name)
                _log.warning(_NONE if name.startswith(NONE) else _UNKNOWN, node, agent_version[:80], name)
        return sorted(times)[:ANSWERED_MAX]
