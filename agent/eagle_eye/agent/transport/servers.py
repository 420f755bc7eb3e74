"""Which of the configured servers this agent sends to: one, until it takes no frames or names another as the leader."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

# For so long after a server refused, no other one's word sends the agent there: it may be reached by servers alone.
TRUST_AGAIN_S = 60.0
_PORTS = {"http": 80, "https": 443}

_log = logging.getLogger("eagle_eye.agent")


class Servers:
    """The servers in the configuration's order. The requests with live frames decide, others read ``current``."""

    def __init__(self, urls: Sequence[str], monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self.current = urls[0]
        self.changes = 0  # how often another server than before took frames
        self._urls = list(urls)
        self._by_place = {place(url): url for url in urls}
        self._monotonic_s = monotonic_s
        self._serving = urls[0]
        self._refused_s = dict.fromkeys(urls, -math.inf)
        self._why: dict[str, str] = {}
        self._refusals = 0  # in a row

    def refused(self, why: str, leader: str = "") -> str:
        """Go on to another server; return "" if it is to be tried at once, else why each one refused.

        The next one is the ``leader`` that the refusing server names, else the one that refused the longest ago.
        """
        self._why[self.current] = why
        self._refused_s[self.current] = self._monotonic_s()
        start = self._urls.index(self.current)
        others = [*self._urls[start + 1 :], *self._urls[:start]]
        self.current = self._named(leader) or min(others, key=self._refused_s.__getitem__, default=self.current)
        self._refusals += 1
        if self._refusals < len(self._urls):
            return ""
        self._refusals = 0
        return "; ".join(f"server {url} {self._why[url]}" for url in self._urls if url in self._why)

    def took(self, leader: str = "") -> bool:
        """Note that the current server took frames; return whether it is another than before, which is logged.

        ``leader`` is whom it passed them on to; the next frames go there.
        """
        changed = self.current != self._serving
        if changed:
            self.changes += 1
            why = self._why.get(self._serving, "was left")
            _log.warning("frames go to server %s now: server %s %s", self.current, self._serving, why)
        self._serving = self.current
        self._refusals = 0
        self._why.clear()
        if named := self._named(leader):
            self._why[self.current] = f"stands by, and says that {named} leads"
            self.current = named
        return changed

    def _named(self, leader: str) -> str:
        """Return the server that another one named, "" unless it is configured and did not refuse just now."""
        try:
            url = self._by_place.get(place(leader), "")
        except ValueError:
            return ""
        if url in ("", self.current) or self._monotonic_s() - self._refused_s[url] < TRUST_AGAIN_S:
            return ""
        return url


def place(url: str) -> tuple[str, str, int | None, str]:
    """Return what two URLs of the same server have in common. Raises ValueError."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or _PORTS.get(parts.scheme), parts.path.rstrip("/")
