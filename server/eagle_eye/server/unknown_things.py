"""What newer agents send and this server does not know: left out, counted, and each thing named once in the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from eagle_eye.server.telemetry import Telemetry

LOGGED_MAX = 256  # different things that the log names: a hostile agent could make up more for ever
ANSWERED_MAX = 32  # that an answer names: an agent reads 64 KiB of it

_log = logging.getLogger(__name__)


class UnknownThings:
    """Takes note of them."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._named: set[str] = set()

    def note(self, node: str, agent_version: str, times: Mapping[str, int]) -> list[str]:
        """Count what was left out of a node's frames, say what is new of it, and return names for the answer."""
        for name, count in times.items():
            self._telemetry.unknown.labels(name.partition(" ")[0]).inc(count)
        for name in times.keys() - self._named:
            if len(self._named) < LOGGED_MAX:
                self._named.add(name)
                said = "node %s (agent %r) sends what this server does not know and leaves out, upgrade the server: %s"
                _log.warning(said, node, agent_version[:80], name)
        return sorted(times)[:ANSWERED_MAX]
