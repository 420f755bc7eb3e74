"""Requests to one server and its changes as they happen, and what goes wrong, using only the standard library.

Touches: the network, the token's file, the environment.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec

from eagle_eye.schema.backoff import Backoff
from eagle_eye.schema.configuration import ConfigurationError, mistyped_variable
from eagle_eye.schema.problem import STANDBY_HEADER, WITHOUT_CELLS_HEADER

# What goes wrong between a program and the server.
#
# ClientError
#     Refused            the server said no, by its problem details
#     Unreachable        no answer, or not all of it
#     UnreadableAnswer   what answered does not speak the API
#     LimitReached       more than this client takes at once
#     MissingExtra       a library for data frames is not installed (also an ImportError)
#
# DataLacking is a warning: the answer stands, and says of which times the history has lost values.


class ClientError(Exception):
    """The base of the client's errors; the text is for people."""


class Refused(ClientError):
    """The server refused a request; the fields are those of its problem details (RFC 9457).

    ``reason`` is the stable word in which ``type`` ends. What answers without them (a proxy) has the type
    "about:blank" and the reason "". ``retry_after_s`` is when the server wants to be asked again, None: it did not say.
    """

    def __init__(self, problem: dict[str, Any], retry_after_s: float | None = None, hint: str = "") -> None:
        self.status = int(problem["status"])
        self.title = str(problem["title"])
        self.detail = str(problem["detail"])
        self.type = str(problem["type"])
        self.reason = str(problem["reason"])
        self.retry_after_s = retry_after_s
        super().__init__(f"HTTP {self.status}: {self.detail}{hint}")


class Unreachable(ClientError):
    """The server did not answer, or stopped in the middle of its answer."""


class UnreadableAnswer(ClientError):
    """An answer that is none of this API."""


class LimitReached(ClientError):
    """More than this client takes at once; the text says the limit and what to ask for instead."""


class MissingExtra(ClientError, ImportError):
    """Data frames need libraries that are not installed; the text says which extra brings them."""


class DataLacking(UserWarning):
    """Of some times values are lacking: damage, a store that does not answer, or nothing was observed at all."""


DEFAULT_SERVER = "http://127.0.0.1:8470"
TIMEOUT_S = 30.0
ANSWER_BYTES_MAX = 64 << 20
PROBLEM_BYTES_MAX = 1 << 20
TOKEN_BYTES_MAX = 4_096
PAGE_MAX = 1_000  # items of one page, the server's limit
VARIABLES = ("EAGLE_EYE_SERVER", "EAGLE_EYE_TOKEN_FILE")

_log = logging.getLogger(__name__)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Rejects redirects, so that the token is not sent elsewhere."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        return None


class _Page(msgspec.Struct):
    items: list[Any]
    next: str | None = None


class HttpClient:
    """Requests to one server. ``url`` and ``token_file`` default to EAGLE_EYE_SERVER and EAGLE_EYE_TOKEN_FILE.

    ``timeout_s`` is for a connection, and for each part of an answer. Raises ConfigurationError for variables that are
    nearly called like these two, ClientError for a URL or a file that is none.
    """

    # What errors call that which has to be changed.
    URL: ClassVar[str] = "url"
    TOKEN_FILE: ClassVar[str] = "token_file"  # noqa: S105 - an argument's name
    LIMIT: ClassVar[str] = "limit"

    def __init__(
        self, url: str | None = None, token_file: str | Path | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        if wrong := mistyped_variable(os.environ, VARIABLES, warn=False):
            raise ConfigurationError(wrong)
        server = url or os.environ.get("EAGLE_EYE_SERVER") or DEFAULT_SERVER
        if not server.startswith(("http://", "https://")):
            raise ClientError(f"{self.URL}: expected a URL such as {DEFAULT_SERVER}, got {server!r}")
        self.server = server.rstrip("/")
        file = token_file or os.environ.get("EAGLE_EYE_TOKEN_FILE") or None
        self.token = "" if file is None else self._token_in(Path(file))  # "": none is sent
        self._timeout_s = timeout_s
        self._standby_said = False
        self._cells_said = ""  # which cells were silent, as it was told last
        # Proxies from the environment are ignored: they would see the token and could not reach loopback.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)

    def call(self, method: str, path: str, query: Mapping[str, Any] | None = None, body: Any = None) -> Any:
        """Return the answer's JSON, None for an empty one. Raises ClientError."""
        content = self.read(method, path, query, body)
        return self.decoded(content, Any) if content else None

    def read(self, method: str, path: str, query: Mapping[str, Any] | None = None, body: Any = None) -> bytes:
        """Return the answer's body. Raises ClientError; LimitReached where it is too large."""
        with self._answer(method, path, query, body) as answer:
            content: bytes = answer.read(ANSWER_BYTES_MAX + 1)
            # read() says nothing of bytes that never came, nor of a head that broke off.
            missing = answer.length if len(content) <= ANSWER_BYTES_MAX else 0
            headless = not content and answer.length is None and not answer.chunked
        if missing or headless:
            raise Unreachable(
                f"{self.server} stopped in the middle of its answer: {missing or 'all'} bytes are missing"
            )
        if len(content) > ANSWER_BYTES_MAX:
            most = f"more than {ANSWER_BYTES_MAX >> 20} MiB"
            raise LimitReached(f"{path}: the answer has {most}; ask for less ({self.LIMIT})")
        return content

    def decoded(self, content: bytes, shape: Any) -> Any:
        """Return JSON as ``shape``. Raises UnreadableAnswer."""
        try:
            return msgspec.json.decode(content, type=shape)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            wrong = f"the answer is not the API's: {error}" if shape is not Any else "the answer is no JSON"
            raise UnreadableAnswer(f"{wrong}; is {self.URL} an Eagle Eye server?") from None

    def pages(self, path: str, query: Mapping[str, Any], items_max: int) -> tuple[list[Any], bool]:
        """Return at most ``items_max`` items of a list, and whether there are more. Raises ClientError.

        Pages of large items become shorter until they fit into an answer.
        """
        items: list[Any] = []
        cursor: str | None = None
        most = PAGE_MAX
        while len(items) < items_max:
            limit = min(items_max - len(items), most)
            try:
                content = self.read("GET", path, {**query, "limit": limit, "cursor": cursor})
            except LimitReached:
                if limit == 1:
                    raise
                most = limit // 2
                continue
            page: _Page = self.decoded(content, _Page)
            items += page.items
            cursor = page.next
            if cursor is None:
                break
        return items[:items_max], cursor is not None or len(items) > items_max

    @contextlib.contextmanager
    def stream(
        self,
        path: str,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        silence_s: float = 0.0,
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield an answer that is read bit by bit; the server may be silent for ``silence_s`` or else ``timeout_s``.

        Raises ClientError, Unreachable also while it is read.
        """
        with self._answer("GET", path, query, None, headers, silence_s) as answer:
            yield answer

    @contextlib.contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        body: Any,
        headers: Mapping[str, str] | None = None,
        silence_s: float = 0.0,
    ) -> Iterator[http.client.HTTPResponse]:
        given = {name: value for name, value in (query or {}).items() if value is not None}
        url = f"{self.server}{path}" + (f"?{urllib.parse.urlencode(given)}" if given else "")
        sent = {"Accept": "application/json", "Content-Type": "application/json", **(headers or {})}
        if self.token:
            sent["Authorization"] = f"Bearer {self.token}"
        data = None if body is None else msgspec.json.encode(body)
        request = urllib.request.Request(url, data, sent, method=method)  # noqa: S310 - the scheme was checked
        try:
            answer = self._opener.open(request, timeout=max(self._timeout_s, silence_s))
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error) from None
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "reason", None) or error
            raise Unreachable(f"{self.server} cannot be reached: {why}; is {self.URL} right?") from None
        with answer:
            self._note_standby(answer.headers.get(STANDBY_HEADER))
            self._note_cells(answer.headers.get(WITHOUT_CELLS_HEADER))
            try:
                yield answer
            except (TimeoutError, ConnectionError, ssl.SSLError, http.client.HTTPException) as error:
                raise Unreachable(f"{self.server} stopped in its answer: {error}") from None

    def _note_standby(self, why: str | None) -> None:
        if why is None or self._standby_said:
            return
        self._standby_said = True
        self.say_standby(why)

    def _note_cells(self, silent: str | None) -> None:
        if silent is not None and silent != self._cells_said:
            self._cells_said = silent
            self.say_cells(silent)

    def say_cells(self, silent: str) -> None:
        """Tell people, once, which cells gave no answer."""
        _log.warning("%s", self.cells_words(silent))

    def cells_words(self, silent: str) -> str:
        """Return what is to be told of cells that gave no answer."""
        return f"no answer of cell {silent}: what it alone knows is missing"

    def say_standby(self, why: str) -> None:
        """Tell people, once, that a standby answers from the records."""
        _log.warning("%s", self.standby_words(why))

    def standby_words(self, why: str) -> str:
        """Return what is to be told of a standby that answers for a leader that is away."""
        return f"{self.server} stands by, and answers from the records, without what agents send now: {why}"

    def _token_in(self, file: Path) -> str:
        try:
            with file.open("rb") as opened:
                token = opened.read(TOKEN_BYTES_MAX + 1).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ClientError(f"{self.TOKEN_FILE}: {file} cannot be read: {type(error).__name__}") from None
        if len(token) > TOKEN_BYTES_MAX or not token.isprintable():  # it goes into a header
            raise ClientError(f"{self.TOKEN_FILE}: {file}: expected one line of ASCII, a token")
        return token

    def _refusal(self, error: urllib.error.HTTPError) -> Refused:
        said: dict[str, Any] = {}
        try:
            read = msgspec.json.decode(error.read(PROBLEM_BYTES_MAX))
            said = read if isinstance(read, dict) and "detail" in read else {}
        except (msgspec.DecodeError, UnicodeDecodeError, OSError, http.client.HTTPException):
            pass
        plain = {"title": error.reason, "detail": error.reason, "type": "about:blank", "reason": ""}
        hint = f" ({self.TOKEN_FILE})" if error.code == HTTPStatus.UNAUTHORIZED else ""
        waits = error.headers.get("Retry-After") or ""
        retry_after_s = float(waits) if waits.isascii() and waits.isdigit() else None
        return Refused({**plain, **said, "status": error.code}, retry_after_s, hint)


# The server's changes as they happen: server-sent events, read on after the connection was lost.

EVENTS_PATH = "/api/v1/events"
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 15.0
RESET = "reset"
SILENCE_S = 40.0  # the server says something every 15 s; after this long the connection is dead
# What a server or a proxy says that is not to be asked just now.
LATER = (
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)


class ServerEvent(NamedTuple):
    """One change: ``kind`` is incident, action, job, node, delivery, subscription, silence or event.

    ``record`` is what it is now. ``id`` grows; ``Client.events(after=id)`` goes on behind it. Of the kind "reset" the
    changes that were missed are no longer kept: read the lists anew.
    """

    id: int
    kind: str
    record: dict[str, Any]


class EventStream:
    """Follows the changes of one server, from ``after`` or else from now on.

    A lost connection is made again for ``patience_s``, and then nothing was missed. The first one must succeed.
    ``after`` is always where to go on.
    """

    def __init__(
        self,
        client: HttpClient,
        after: int | None,
        patience_s: float,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.after = after
        self._client = client
        self._patience_s = patience_s
        self._now_s = now_s
        self._sleep = sleep
        self._backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
        self._connected = False
        self._lost_s: float | None = None

    def follow(self) -> Iterator[ServerEvent]:
        """Yield the changes. Raises Unreachable when nobody answers for ``patience_s``, Refused, UnreadableAnswer."""
        while True:
            problem: ClientError
            try:
                yield from self._one_connection()
                problem = Unreachable(f"{self._client.server} ended the stream of events")
            except Unreachable as error:
                problem = error
            except Refused as error:
                if error.status not in LATER:
                    raise
                problem = error
            if not self._connected:
                raise problem
            self._wait(problem)

    def _one_connection(self) -> Iterator[ServerEvent]:
        headers = {"Accept": "text/event-stream"}
        if self.after is not None:
            headers["Last-Event-ID"] = str(self.after)
        with self._client.stream(EVENTS_PATH, headers=headers, silence_s=SILENCE_S) as answer:
            self._connected = True
            self._lost_s = None
            for fields in event_messages(answer.readline):
                self._backoff.reset()
                if fields["id"].isdecimal():
                    self.after = int(fields["id"])
                if fields["event"]:
                    record = self._client.decoded(fields["data"].encode(), dict[str, Any])
                    yield ServerEvent(self.after or 0, fields["event"], record)

    def _wait(self, problem: ClientError) -> None:
        now_s = self._now_s()
        self._lost_s = now_s if self._lost_s is None else self._lost_s
        wait_s = max(self._backoff.next_s(), (problem.retry_after_s or 0.0) if isinstance(problem, Refused) else 0.0)
        if now_s + wait_s - self._lost_s > self._patience_s:
            on = "" if self.after is None else f"; events(after={self.after}) goes on where this stopped"
            raise Unreachable(f"no events for {self._patience_s:g} s (patience_s): {problem}{on}") from problem
        self._sleep(wait_s)


def event_messages(readline: Callable[[int], bytes]) -> Iterator[dict[str, str]]:
    """Yield the fields id, event and data of each message, "" for one that it lacks. Raises LimitReached.

    Comments are left out, and so is a message that was cut off.
    """
    fields = dict.fromkeys(("id", "event", "data"), "")
    while line := readline(ANSWER_BYTES_MAX + 1):
        if len(line) > ANSWER_BYTES_MAX:
            raise LimitReached(f"an event has more than {ANSWER_BYTES_MAX >> 20} MiB")
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        if text:
            name, _, value = text.partition(":")
            if name in fields:
                fields[name] = value.removeprefix(" ")
        elif any(fields.values()):
            yield fields
            fields = dict.fromkeys(fields, "")
