"""torchft's lighthouse over HTTP: the members, their steps, and ending a replica.

The lighthouse has no API for machines: /status is a fragment of its page (torchft 0.1 and 0.2). Missing data is an
error, never an empty quorum.
"""

from __future__ import annotations

import contextlib
import html
import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

import httpx

from eagle_eye.orchestrators.errors import CannotCarryOutError
from eagle_eye.orchestrators.server_client import authorities

TIMEOUT_S = 5.0
# The lighthouse waits 10 s for a manager that does not answer, and so do all later actions on the job.
KILL_TIMEOUT_S = 2.0
PAGE_BYTES_MAX = 4 << 20
_QUORUM = re.compile(r"Current quorum_id:\s*(-?\d+)")
_MEMBER = re.compile(
    r"<b>\s*(?P<id>[^<]+?)\s*</b>.*?Step:\s*(?P<step>-?\d+).*?Manager:\s*(?P<manager>\S*?)\s*<br", re.DOTALL
)
_HEARTBEAT = re.compile(r"^\s*(?P<id>\S+): seen (?P<age>[0-9.e+-]+)s ago", re.MULTILINE)


class NoAnswerError(CannotCarryOutError):
    """The lighthouse has the request, and did not answer in time."""


@dataclass(frozen=True)
class Replica:
    """A replica group in the latest quorum. ``id`` is its name, a colon and a part that is new at each start."""

    id: str
    step: int
    host: str

    @property
    def group(self) -> str:
        """Return the name that is kept across restarts of the group."""
        return self.id.rpartition(":")[0] or self.id


@dataclass(frozen=True)
class LighthouseStatus:
    """The lighthouse's state. ``heartbeats``: seconds since each replica's last heartbeat, by id, also of dead ones."""

    quorum_id: int
    replicas: tuple[Replica, ...]
    heartbeats: dict[str, float]

    @property
    def step(self) -> int:
        """Return the highest step of the latest quorum, -1 where there was none."""
        return max((replica.step for replica in self.replicas), default=-1)


class Lighthouse:
    """One lighthouse; ``url`` as in TORCHFT_LIGHTHOUSE. Every call raises CannotCarryOutError where it fails."""

    def __init__(self, url: str) -> None:
        """Raise ValueError for an invalid URL."""
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--lighthouse is {url!r}; expected http://HOST:29510")
        self._http = httpx.Client(timeout=TIMEOUT_S, verify=authorities(), trust_env=False, follow_redirects=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def status(self) -> LighthouseStatus:
        """Return the lighthouse's current state."""
        return parse_status(self._answered(lambda: self._http.get(f"{self.url}/status")).text)

    def kill(self, replica_id: str) -> None:
        """Tell the lighthouse to end the replica. Only a later status shows whether it did.

        A manager that obeys exits before it answers, which the lighthouse reports as an error. One that is stopped or
        cannot be reached does not answer at all: it is not waited for.
        """
        path = f"{self.url}/replica/{quote(replica_id, safe=':')}/kill"
        with contextlib.suppress(NoAnswerError):
            self._answered(lambda: self._http.post(path, timeout=KILL_TIMEOUT_S), fine=500)

    def _answered(self, call: Callable[[], httpx.Response], fine: int = 200) -> httpx.Response:
        try:
            answer = call()
        except httpx.ReadTimeout:
            raise NoAnswerError(f"the lighthouse {self.url}: ReadTimeout") from None
        except httpx.HTTPError as error:
            raise CannotCarryOutError(f"the lighthouse {self.url}: {type(error).__name__}") from None
        if not answer.is_success and answer.status_code != fine:
            raise CannotCarryOutError(f"the lighthouse {self.url}: HTTP {answer.status_code}")
        if len(answer.content) > PAGE_BYTES_MAX:
            raise CannotCarryOutError(f"the lighthouse {self.url}: a page of over {PAGE_BYTES_MAX} bytes")
        return answer


def parse_status(page: str) -> LighthouseStatus:
    """Return the page's data. Raises CannotCarryOutError where it is not a lighthouse's."""
    quorum = _QUORUM.search(page)
    if quorum is None:
        raise CannotCarryOutError("the lighthouse's /status is not understood; is --lighthouse a lighthouse?")
    try:
        return _status(int(quorum[1]), page)
    except ValueError as error:  # from an invalid number or address
        raise CannotCarryOutError(f"the lighthouse's /status is not understood: {str(error)[:200]}") from None


def _status(quorum_id: int, page: str) -> LighthouseStatus:
    members, _, heartbeats = page.partition("Heartbeats")
    replicas = []
    for block in members.split('<div class="member')[1:]:
        found = _MEMBER.search(block)
        if found is None:
            raise CannotCarryOutError("a member on the lighthouse's /status is not understood")
        host = urlsplit(html.unescape(found["manager"])).hostname or ""
        replicas.append(Replica(html.unescape(found["id"]), int(found["step"]), host))
    ages = {html.unescape(found["id"]): float(found["age"]) for found in _HEARTBEAT.finditer(heartbeats)}
    if replicas and not ages:
        # Without it every replica would seem dead.
        raise CannotCarryOutError("the heartbeats on the lighthouse's /status are not understood")
    return LighthouseStatus(quorum_id, tuple(replicas), ages)
