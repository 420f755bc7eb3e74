"""The line with which an agent says, once the server takes its frames, what it reads and what it does not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from eagle_eye.agent.loop.collector import CollectorStanding, TickFrame

_log = logging.getLogger("eagle_eye.agent")


class Greeting:
    """Logs one line at the first tick for which ``server`` returns a URL: "" before the server has taken a frame."""

    def __init__(self, node: str, server: Callable[[], str]) -> None:
        self._node = node
        self._server = server
        self._said = False

    def show(self, tick: TickFrame) -> None:
        """Take the newest tick."""
        url = "" if self._said else self._server()
        if url:
            self._said = True
            _log.info("%s", greeting(self._node, url, tick.collectors))


def greeting(node: str, url: str, collectors: Sequence[CollectorStanding]) -> str:
    """Return the line: how many sources are read, which are not, and whether that is to be mended."""
    parts = (
        ("simulated", [one.name for one in collectors if one.simulated]),
        ("to be mended, as eagle-eye doctor says", [one.name for one in collectors if one.failing]),
        ("not on this host, which is no fault", [one.name for one in collectors if not one.supported]),
    )
    count = sum(one.ok for one in collectors)
    read = f"connected to {url} as {node}: {count} source{'' if count == 1 else 's'} read in full"
    return "; ".join([read, *(f"{what}: {', '.join(sorted(names))}" for what, names in parts if names)])
