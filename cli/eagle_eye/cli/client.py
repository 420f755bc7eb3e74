"""The operator's requests to a server, using only the standard library."""

from __future__ import annotations

import contextlib
import http.client
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from eagle_eye.cli.tables import printable
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.environment_names import slip
from eagle_eye.schema.problem import STANDBY_HEADER

DEFAULT_SERVER = "http://127.0.0.1:8470"
TIMEOUT_S = 30.0
ANSWER_BYTES_MAX = 64 << 20
TOKEN_BYTES_MAX = 4_096


class ServerSaidNo(Exception):
    """The server refused, or was unreachable; the message is for people."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Rejects redirects, so that the token is not sent elsewhere."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        return None


class Client:
    """A client of one server, by its URL. ``token`` "": none is sent."""

    def __init__(self, server: str, token: str = "") -> None:
        if not server.startswith(("http://", "https://")):
            raise ServerSaidNo(f"--server: expected a URL such as {DEFAULT_SERVER}, got {server!r}")
        self.server = server.rstrip("/")
        self.token = token
        self._said = False  # that a standby answers from the records
        # Proxies from the environment are ignored: they would see the token and could not reach loopback.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)

    def call(self, method: str, path: str, query: Mapping[str, Any] | None = None, body: Any = None) -> Any:
        """Return the answer's JSON, None for an empty one. Raises ServerSaidNo."""
        with self._answer(method, path, query, body) as answer:
            content = answer.read(ANSWER_BYTES_MAX + 1)
        if len(content) > ANSWER_BYTES_MAX:
            raise ServerSaidNo(f"{path}: the answer has more than {ANSWER_BYTES_MAX >> 20} MiB; ask for less (--limit)")
        return _json(content)

    @contextlib.contextmanager
    def stream(self, path: str, query: Mapping[str, Any]) -> Iterator[Callable[[int], bytes]]:
        """Yield a function that reads up to so many bytes of the answer, b"" at its end. Raises ServerSaidNo."""
        with self._answer("GET", path, query, None) as answer:
            yield answer.read

    @contextlib.contextmanager
    def _answer(self, method: str, path: str, query: Mapping[str, Any] | None, body: Any) -> Iterator[Any]:
        given = {name: value for name, value in (query or {}).items() if value is not None}
        url = f"{self.server}{path}" + (f"?{urllib.parse.urlencode(given)}" if given else "")
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        data = None if body is None else msgspec.json.encode(body)
        request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310 - the scheme was checked
        try:
            answer = self._opener.open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                raise ServerSaidNo(_reason(error)) from None
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "reason", None) or error
            raise ServerSaidNo(f"{self.server} cannot be reached: {why}; is --server right?") from None
        with answer:
            self._say_standby(answer.headers.get(STANDBY_HEADER))
            try:
                yield answer
            except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
                raise ServerSaidNo(f"{self.server} stopped in the middle of its answer: {error}") from None

    def _say_standby(self, why: str | None) -> None:
        if why is None or self._said:
            return
        self._said = True
        said = f"{self.server} stands by, and answers from the records, without what agents send now"
        sys.stderr.write(f"{said}: {printable(why)}\n")

    def pages(self, path: str, query: Mapping[str, Any], items_max: int) -> tuple[list[dict[str, Any]], bool]:
        """Return at most ``items_max`` items of a list, and whether there are more. Raises ServerSaidNo."""
        items: list[dict[str, Any]] = []
        cursor: str | None = None
        while len(items) < items_max:
            limit = min(items_max - len(items), 1_000)
            page = self.call("GET", path, {**query, "limit": limit, "cursor": cursor})
            items += page["items"]
            cursor = page["next"]
            if cursor is None:
                return items, False
        return items, True


def connect(server: str | None, token_file: Path | None) -> Client:
    """Return the client for a command's flags; defaults are in EAGLE_EYE_SERVER and EAGLE_EYE_TOKEN_FILE."""
    if wrong := slip(os.environ, ("EAGLE_EYE_SERVER", "EAGLE_EYE_TOKEN_FILE"), warn=False):
        raise ConfigurationError(wrong)
    file = token_file or (Path(found) if (found := os.environ.get("EAGLE_EYE_TOKEN_FILE")) else None)
    token = ""
    if file is not None:
        try:
            with file.open("rb") as opened:
                token = opened.read(TOKEN_BYTES_MAX + 1).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ServerSaidNo(f"--token-file: {file} cannot be read: {type(error).__name__}") from None
        if len(token) > TOKEN_BYTES_MAX or not token.isprintable():  # it goes into a header
            raise ServerSaidNo(f"--token-file: {file}: expected one line of ASCII, a token")
    return Client(server or os.environ.get("EAGLE_EYE_SERVER") or DEFAULT_SERVER, token)


def _json(body: bytes) -> Any:
    if not body:
        return None
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ServerSaidNo("the answer is no JSON; is --server an Eagle Eye server?") from None


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        problem = msgspec.json.decode(error.read(1 << 20))
        detail = str(problem["detail"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, OSError):
        detail = error.reason
    hint = " (--token-file)" if error.code == http.HTTPStatus.UNAUTHORIZED else ""
    return f"HTTP {error.code}: {detail}{hint}"
