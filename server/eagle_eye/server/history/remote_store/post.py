"""Sends samples to the store until each is accepted or rejected for good.

Temporary failures (no connection, 429, 5xx, wrong credentials or address) are retried indefinitely. Rejections of the
samples themselves (400, 409, 413, 422) are not: the request is split until the rejected samples are isolated, so that
all others are stored.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from eagle_eye.schema.backoff import Backoff
from eagle_eye.server.history.remote_store import encoding
from eagle_eye.server.history.remote_store.credentials import CredentialsUnreadable
from eagle_eye.server.history.remote_store.segment_samples import IntervalSamples
from eagle_eye.server.model.errors import ServerError

BACKOFF_BASE_S = 0.5
BACKOFF_MAX_S = 60.0
RETRY_AFTER_S_MAX = 300.0
TRIES_MAX = 64  # maximum number of requests made out of one rejected request
HOPELESS_TRIES = 15  # after this many with nothing accepted the rest is given up: eight parts were all rejected
REASON_BYTES_MAX = 4_096

_ABOUT_SAMPLES = frozenset({400, 409, 413, 422})
_REASONS = (
    ("out of order", "out_of_order"),
    ("out-of-order", "out_of_order"),
    ("out of bounds", "too_old"),
    ("too old", "too_old"),
    ("duplicate", "duplicate"),
)
_HEADERS = {
    "Content-Type": encoding.CONTENT_TYPE,
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": encoding.VERSION,
    "User-Agent": "eagle-eye",
}


class Unwanted(ServerError):
    """The samples need not be sent any more: the server has stopped."""


@dataclass(slots=True)
class Brought:
    """The result of sending samples, and the store's first complaint."""

    taken: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    complaint: str = ""


class _Answer(Exception):
    """The store did not accept the request; ``retry_s`` None means that it never will."""

    def __init__(self, reason: str, detail: str, retry_s: float | None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.retry_s = retry_s


class Post:
    """Sends requests to ``url``; for any thread.

    ``wait(seconds)`` sleeps, and raises Unwanted once sending is no longer wanted. ``troubled(reason, detail)`` is
    called for every attempt that will be repeated, ``troubled("", "")`` for the first answered one after that.
    """

    def __init__(
        self,
        client: httpx.Client,
        url: str,
        wait: Callable[[float], None],
        troubled: Callable[[str, str], None],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._url = url
        self._wait = wait
        self._troubled = troubled
        self._jitter = jitter

    def bring(self, moment: IntervalSamples) -> Brought:
        """Return once the store has accepted or rejected every sample. Raises Unwanted."""
        brought = Brought()
        waiting = deque([moment])
        tries = 0
        while waiting:
            part = waiting.popleft()
            size = len(part.heads)
            tries += 1
            no = self._answered(encoding.request(part.heads, part.samples))
            if no is None:
                brought.taken += size
                continue
            brought.complaint = brought.complaint or str(no)
            hopeless = tries >= HOPELESS_TRIES and brought.taken == 0
            if size == 1 or tries + len(waiting) >= TRIES_MAX or hopeless:
                brought.refused[no.reason] += size
            else:
                half = size // 2
                waiting.append(IntervalSamples(part.heads[:half], part.samples[:half]))
                waiting.append(IntervalSamples(part.heads[half:], part.samples[half:]))
        return brought

    def _answered(self, body: bytes) -> _Answer | None:
        """Return None once the store has accepted the body, or why it never will."""
        backoff = Backoff(BACKOFF_BASE_S, BACKOFF_MAX_S, self._jitter)
        while True:
            try:
                self._try(body)
            except _Answer as answer:
                if answer.retry_s is None:
                    return self._settled(answer, backoff)
                self._troubled(answer.reason, str(answer))
                self._wait(max(answer.retry_s, backoff.next_s()))
            else:
                return self._settled(None, backoff)

    def _settled(self, answer: _Answer | None, backoff: Backoff) -> _Answer | None:
        if backoff.failures:
            self._troubled("", "")
        return answer

    def _try(self, body: bytes) -> None:
        """Return if the store accepted the body. Raises _Answer."""
        try:
            with self._client.stream("POST", self._url, content=body, headers=_HEADERS) as response:
                if response.is_success:
                    return
                said = _beginning(response)
                status = response.status_code
                after = response.headers.get("Retry-After", "")
        except httpx.HTTPError as error:
            raise _Answer("unreachable", f"the store cannot be reached: {type(error).__name__}", 0.0) from None
        except CredentialsUnreadable as error:
            raise _Answer("credentials", str(error), 0.0) from None
        detail = f"the store answered HTTP {status}: {said}"
        if status in _ABOUT_SAMPLES:
            raise _Answer(_reason(status, said), detail, None)
        retry_s = min(float(after), RETRY_AFTER_S_MAX) if after.isascii() and after.isdigit() else 0.0
        raise _Answer("busy" if status == 429 or status >= 500 else "configuration", detail, retry_s)


def _beginning(response: httpx.Response) -> str:
    """Return the beginning of the store's response, in one line."""
    found = b""
    for part in response.iter_bytes(REASON_BYTES_MAX):
        found += part
        if len(found) >= REASON_BYTES_MAX:
            break
    return " ".join(found[:500].decode(errors="replace").split())


def _reason(status: int, said: str) -> str:
    if status == 413:
        return "too_large"
    return next((reason for text, reason in _REASONS if text in said.lower()), "refused")
