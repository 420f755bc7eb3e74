"""Calls Eagle Eye's server: bearer token, problem details, no redirects, no secrets in errors."""

from __future__ import annotations

import functools
import ssl
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from eagle_eye.orchestrators.errors import RejectedError, ServerUnreachableError
from eagle_eye.schema.action import ActionRequest

TIMEOUT_S = 5.0
BACKOFF_S, BACKOFF_S_MAX = 0.2, 15.0  # between retries, while the server is unreachable
_PORTS = {"http": 80, "https": 443}


class ServerClient:
    """One server, thread-safe. ``url`` is its root, ``token`` its bearer token or ""."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        if origin(self.url) is None:
            raise ValueError(f"server is {url!r}; expected http://HOST:PORT or https://HOST")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        # The server is the site's own: proxies for the outside world do not apply.
        self._http = httpx.Client(
            headers=headers, timeout=TIMEOUT_S, verify=authorities(), trust_env=False, follow_redirects=False
        )

    def close(self) -> None:
        """Close the connections; no method may be called afterwards."""
        self._http.close()

    def call(self, method: str, path: str, body: Any = None, timeout_s: float = TIMEOUT_S) -> Any:
        """Return the answer's JSON, None for an empty one. Raises RejectedError or ServerUnreachableError."""
        try:
            answer = self._http.request(method, self.url + path, json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise ServerUnreachableError(f"{method} {path}: {type(error).__name__}") from None
        if not answer.is_success:
            said = f"{method} {path}: HTTP {answer.status_code} {_detail(answer)}"
            raise RejectedError(said.rstrip(), answer.status_code)
        if not answer.content:
            return None
        try:
            return answer.json()
        except ValueError:
            raise ServerUnreachableError(f"{method} {path}: the answer is not JSON") from None

    def report_path(self, action: ActionRequest) -> tuple[str, bool]:
        """Return the path to report to, and whether it is the one that the action named.

        Only the configured server is ever called, whatever a (signed) action says: if ``report_to`` has another origin,
        the report goes to the API's fixed path.
        """
        if origin(action.report_to) == origin(self.url):
            there, root = urlsplit(action.report_to), urlsplit(self.url).path
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


def _detail(answer: httpx.Response) -> str:
    try:
        document = answer.json()
    except ValueError:
        return ""
    detail = document.get("detail") if isinstance(document, dict) else None
    return str(detail)[:300] if detail else ""
