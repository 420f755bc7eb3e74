"""What a subscriber says to the server: calls, claims before anything is changed, reports until they are confirmed."""

from __future__ import annotations

import functools
import logging
import math
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from eagle_eye.orchestrators.cloudevent import unix_seconds
from eagle_eye.orchestrators.ledger import Ledger, OwedReport
from eagle_eye.orchestrators.protocol import RejectedError, ServerUnreachableError
from eagle_eye.schema.action import ActionClaim, ActionRequest, Report, ReportState
from eagle_eye.schema.backoff import Backoff
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


CLAIM_LEASES = 2.0  # how long nobody may answer: meanwhile another server leads, if there is one
CLAIM_AGAIN_S = 0.5
_UNKNOWN = 404  # to the server, whose records were lost: it asks for the action anew
_NO = (_UNKNOWN, 409)  # not known, or not to begin


class StoppingError(Exception):
    """The process is stopping; waiting work is left to the next one."""


class Claims:
    """Asks for each action, for two of the server's leases where nobody answers; once where the server is alone.

    Then it is begun unclaimed, unless the ledger has begun the same before: the same kind, job, attempt and nodes.
    ``count`` is called with each outcome, one word.
    """

    def __init__(
        self,
        client: ServerClient,
        ledger: Ledger,
        count: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._count = count
        self._clock = clock
        self._monotonic_s = monotonic_s

    def __call__(self, action: ActionRequest, stopping: threading.Event) -> str | None:
        """Return why the action must not be begun, None where it may. Raises StoppingError."""
        path, _ = self._client.report_path(action)
        body = msgspec.to_builtins(ActionClaim("accepted", "about to begin", self._ledger.name, action.epoch))
        until_s = self._monotonic_s() + CLAIM_LEASES * action.lease_seconds
        timeout_s = min(TIMEOUT_S, action.lease_seconds or TIMEOUT_S)
        while True:
            try:
                self._client.call("POST", path, body, timeout_s)
            except RejectedError as error:
                if error.status in _NO:
                    if error.status == _UNKNOWN:
                        self._ledger.let_go(action.action_id)
                        log.warning("action %s is not begun: %s", action.action_id, error)
                    self._count("refused")
                    return str(error)
                problem = str(error)
            except ServerUnreachableError as error:
                problem = str(error)
            else:
                self._count("granted")
                return None
            if self._monotonic_s() + CLAIM_AGAIN_S >= until_s:
                return self._unanswered(action, problem)
            log.warning("action %s cannot be claimed: %s; will ask again", action.action_id, problem)
            if stopping.wait(CLAIM_AGAIN_S):
                raise StoppingError

    def _unanswered(self, action: ActionRequest, problem: str) -> str | None:
        same = self._ledger.begun_as(action)
        if same is None and self._clock() < unix_seconds(action.expires, "expires"):
            self._count("unanswered")
            log.warning("action %s is begun unclaimed: %s", action.action_id, problem)
            return None
        self._count("refused")
        return f"{problem}; " + ("it has expired" if same is None else f"the same was begun as action {same}")


# The report is of interest to people long after the action itself has expired.
KEEP_AFTER_EXPIRY_S = 3_600.0
DETAIL_CHARACTERS_MAX = 2_000


class Reporter:
    """Sends pending reports on its own thread, from ``start`` to ``stop``; an earlier process's first."""

    def __init__(
        self,
        client: ServerClient,
        ledger: Ledger,
        clock: Callable[[], float] = time.time,
        backoff: Backoff | None = None,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._clock = clock
        self._backoff = backoff or Backoff(BACKOFF_S, BACKOFF_S_MAX)
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)

    def __call__(self, action: ActionRequest, state: ReportState, detail: str) -> None:
        """Store the report durably; it will be sent."""
        path, named = self._client.report_path(action)
        if not named:
            log.warning("action %s: report_to is not our server's; using %s", action.action_id, path)
        until_s = max(self._clock(), unix_seconds(action.expires, "expires")) + KEEP_AFTER_EXPIRY_S
        self._ledger.owe(action.action_id, path, Report(state, detail[:DETAIL_CHARACTERS_MAX]), until_s)
        self._wake.set()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start sending pending reports."""
        self._thread.start()

    def stop(self, within_s: float) -> bool:
        """Stop sending; return whether all was delivered. Waits for pending reports, up to ``within_s``."""
        until_s = time.monotonic() + within_s
        while self._thread.is_alive() and self._ledger.owed() and time.monotonic() < until_s:
            time.sleep(0.02)
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(10.0)
        return not self._ledger.owed()

    def _run(self) -> None:
        while not self._stopping:
            # Cleared before looking, so that a report made meanwhile wakes the next wait.
            self._wake.clear()
            try:
                all_sent = self._send_owed()
            except Exception:
                log.exception("reports")  # the ledger; it may recover, this thread would not
                all_sent = False
            if all_sent:
                self._backoff.reset()
                self._wake.wait()
            else:
                # A new report does not shorten the wait: it would meet the same server.
                self._pause(self._backoff.next_s())

    def _pause(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while not self._stopping and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.1))

    def _send_owed(self) -> bool:
        """Send in order until one fails; return whether nothing is left."""
        for owed in self._ledger.owed():
            if self._stopping:
                return False
            if self._clock() > owed.until_s:
                log.error("report %r on action %s was never delivered", owed.report.state, owed.action_id)
                self._ledger.settle(owed.sequence, "expired")
            elif not self._send(owed):
                return False
        return True

    def _send(self, owed: OwedReport) -> bool:
        try:
            self._client.call("POST", owed.path, msgspec.to_builtins(owed.report))
        except RejectedError as error:
            if error.may_pass:
                log.warning("report on action %s: %s; will try again", owed.action_id, error)
                return False
            log.warning("report %r on action %s was rejected: %s", owed.report.state, owed.action_id, error)
            self._ledger.settle(owed.sequence, "rejected")
            return True
        except ServerUnreachableError as error:
            log.warning("report on action %s: %s; will try again", owed.action_id, error)
            return False
        self._ledger.settle(owed.sequence, "delivered")
        return True
