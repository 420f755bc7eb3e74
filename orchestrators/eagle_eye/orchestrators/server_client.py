"""Calls Eagle Eye's server, or of several the one that leads: bearer token, no redirects, no secrets in errors."""

from __future__ import annotations

import functools
import logging
import math
import ssl
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from eagle_eye.orchestrators.errors import RejectedError, ServerUnreachableError
from eagle_eye.schema.action import ActionRequest
from eagle_eye.schema.problem import LEADER_HEADER

TIMEOUT_S = 5.0
SILENT_S = 60.0  # for so long a server that did not answer is asked after the others, whoever says that it leads
BACKOFF_S, BACKOFF_S_MAX = 0.2, 15.0  # between retries, while the server is unreachable
SERVERS_MAX = 8
_PORTS = {"http": 80, "https": 443}
_PROXY = (502, 504)  # of a proxy that does not reach its server

log = logging.getLogger(__name__)


class ServerClient:
    """One server, or several on one database, of which the one that leads is found; thread-safe.

    ``url`` is the server's root; of several, with commas between. ``token`` is their bearer token or "".
    """

    def __init__(self, url: str, token: str, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._urls = list(dict.fromkeys(one.strip().rstrip("/") for one in url.split(",")))
        for one in self._urls:
            if origin(one) is None:
                raise ValueError(
                    f"server is {one!r}; expected http://HOST:PORT or https://HOST, commas between several"
                )
        if len(self._urls) > SERVERS_MAX:
            raise ValueError(f"server: expected at most {SERVERS_MAX} URLs, got {len(self._urls)}")
        self._monotonic_s = monotonic_s
        self._current = self._urls[0]
        self._silent_s = dict.fromkeys(self._urls, -math.inf)  # since when each one does not answer
        headers = {"authorization": f"Bearer {token}"} if token else {}
        # The server is the site's own: proxies for the outside world do not apply.
        self._http = httpx.Client(
            headers=headers, timeout=TIMEOUT_S, verify=authorities(), trust_env=False, follow_redirects=False
        )

    def close(self) -> None:
        """Close the connections; no method may be called afterwards."""
        self._http.close()

    @property
    def url(self) -> str:
        """The root of the server that is asked first."""
        return self._current

    def call(self, method: str, path: str, body: Any = None, timeout_s: float = TIMEOUT_S) -> Any:
        """Return the answer's JSON, None for an empty one. Raises RejectedError or ServerUnreachableError.

        Of several servers each one is asked, for ``timeout_s``, until one takes the request: where an answer was lost,
        it is made a second time.
        """
        refused = []
        for url in self._in_turn():
            try:
                answer = self._http.request(method, url + path, json=body, timeout=timeout_s)
            except httpx.HTTPError as error:
                self._silent_s[url] = self._monotonic_s()
                refused.append((url, type(error).__name__))
                continue
            self._silent_s[url] = -math.inf
            if len(self._urls) > 1 and _is_elsewhere(answer):
                refused.append((url, f"HTTP {answer.status_code} {_detail(answer)}".rstrip()))
                continue
            self._goes_on_at(self._named(answer.headers.get(LEADER_HEADER, "")) or url)
            return _content(method, path, answer)
        one = len(self._urls) == 1
        raise ServerUnreachableError(
            f"{method} {path}: " + "; ".join(why if one else f"{url} {why}" for url, why in refused)
        )

    def _in_turn(self) -> list[str]:
        """Return the servers in the order to ask: the one that took the last request, the others, who was silent."""
        since_s = self._monotonic_s() - SILENT_S
        return sorted(self._urls, key=lambda url: (max(since_s, self._silent_s[url]), url != self._current))

    def _named(self, leader: str) -> str:
        """Return which of the servers another one named, "" for none of them or one that was silent just now."""
        for url in self._urls:
            if origin(url) == origin(leader) and self._silent_s[url] <= self._monotonic_s() - SILENT_S:
                return url
        return ""

    def _goes_on_at(self, url: str) -> None:
        if url != self._current:
            log.info("server: %s is asked now, not %s", url, self._current)
            self._current = url

    def report_path(self, action: ActionRequest) -> tuple[str, bool]:
        """Return the path to report to, and whether it is the one that the action named.

        Only configured servers are ever called, whatever a (signed) action says: if ``report_to`` has another origin,
        the report goes to the API's fixed path.
        """
        for url in self._urls:
            if origin(action.report_to) == origin(url):
                there, root = urlsplit(action.report_to), urlsplit(url).path
                if there.path.startswith(f"{root}/") and not there.fragment:
                    return there.path[len(root) :] + (f"?{there.query}" if there.query else ""), True
        return f"/api/v1/actions/{quote(action.action_id, safe='')}/reports", False


@functools.cache
def authorities() -> ssl.SSLContext:
    """Return the trusted CAs: those in SSL_CERT_FILE or SSL_CERT_DIR, else the public ones.

    Cached: reading them dominates a client's start-up time.
    """
    return httpx.create_ssl_context()


def origin(url: str) -> tuple[str, str, int] | None:
    """Return (scheme, host, port) of an http or https URL; None for anything else, credentials included."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in _PORTS or not parts.hostname or "@" in parts.netloc:
        return None
    return parts.scheme, parts.hostname.lower(), port or _PORTS[parts.scheme]


def _is_elsewhere(answer: httpx.Response) -> bool:
    """Return whether another server is to be asked: this one stands by and reaches no leader, or is not reached."""
    return answer.status_code in _PROXY or (answer.status_code == 503 and _document(answer).get("reason") == "standby")


def _content(method: str, path: str, answer: httpx.Response) -> Any:
    if not answer.is_success:
        said = f"{method} {path}: HTTP {answer.status_code} {_detail(answer)}"
        raise RejectedError(said.rstrip(), answer.status_code)
    if not answer.content:
        return None
    try:
        return answer.json()
    except ValueError:
        raise ServerUnreachableError(f"{method} {path}: the answer is not JSON") from None


def _document(answer: httpx.Response) -> dict[str, Any]:
    try:
        document = answer.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _detail(answer: httpx.Response) -> str:
    detail = _document(answer).get("detail")
    return str(detail)[:300] if detail else ""
