"""Which of the configured servers this agent sends to, how it connects, and with which token.

It sends to one, until that takes no frames or names another as the leader.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import math
import os
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit


class Trust(NamedTuple):
    """The CA of the server's certificate, and this host's own certificate, for servers that require one; PEM files.

    ``ca_file`` None: the system's authorities. ``key_file`` None: the key is in ``certificate_file``. Read again for
    each connection, so that files may change.
    """

    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None


SYSTEMS = Trust()


def connect(server: str, trust: Trust, connect_s: float, answer_s: float) -> http.client.HTTPConnection:
    """Return an open connection; reads and writes on it time out after ``answer_s``. Raises OSError.

    Proxies from the environment are ignored: they would see the token.
    """
    parts = urlsplit(server)
    host = parts.hostname or ""
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=trust.ca_file)
        if trust.certificate_file is not None:
            # Without a password OpenSSL would prompt on the terminal.
            context.load_cert_chain(trust.certificate_file, trust.key_file, password=lambda: b"")
        connection = http.client.HTTPSConnection(host, parts.port, timeout=connect_s, context=context)
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=connect_s)
    connection.connect()
    connection.sock.settimeout(answer_s)
    return connection


def path_on(server: str, path: str) -> str:
    """Return a request's path; the server may have a URL prefix."""
    return urlsplit(server).path.rstrip("/") + path


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


# This node's token: read from its file, and obtained with the fleet's join token where there is no valid one.
#
# Touches: the two files, one short HTTP connection.
PATH = "/api/v1/enrol"
TOKEN_CHARS_MAX = 256  # the server's limit
ANSWER_BYTES_MAX = 1 << 16
ENROL_EVERY_S = 60.0  # a fleet with an expired join token must not flood its server


class NodeToken:
    """``file`` None: no token at all. ``join_file`` None: the file is provisioned externally.

    Every error is logged once and keeps the current token: frames wait in the spool.
    """

    def __init__(
        self,
        servers: Servers,
        node: str,
        file: Path | None,
        join_file: Path | None,
        trust: Trust,
        timeout_s: float,
        monotonic_s: Callable[[], float],
    ) -> None:
        self._servers = servers
        self._node = node
        self._file = file
        self._join_file = join_file
        self._trust = trust
        self._timeout_s = timeout_s
        self._monotonic_s = monotonic_s
        self._enrolled_s: dict[str, float] = {}  # by server
        self._said = ""
        self._text = ""
        self._lock = threading.Lock()  # each lane of the uplink asks

    def text(self) -> str:
        """Return the token, obtained on the first call if the file lacks one; empty: there is none."""
        with self._lock:
            if not self._text:
                self._text = self._read(self._file) or self._enrol()
            return self._text

    def refused(self) -> bool:
        """Handle a token rejected by the server; return whether there is another one to try."""
        with self._lock:
            old = self._text
            new = self._read(self._file)
            if not new or new == old:
                new = self._enrol()
            if new:
                self._text = new
            return bool(new) and new != old

    def _enrol(self) -> str:
        """Obtain a token from the server and save it first; empty: not now."""
        now_s = self._monotonic_s()
        if self._file is None or self._join_file is None:
            return ""
        server = self._servers.current
        if now_s - self._enrolled_s.get(server, -math.inf) < ENROL_EVERY_S:
            return ""
        self._enrolled_s[server] = now_s
        join = self._read(self._join_file)
        if not join:
            return ""
        try:
            text = self._bought(server, join, self._file)
        except (OSError, http.client.HTTPException) as error:
            self._say(f"node {self._node} cannot be enrolled: {type(error).__name__}: {error}")
            return ""
        if text:
            self._said = ""
            _log.info("node %s is enrolled; its token is in %s", self._node, self._file)
        return text

    def _bought(self, server: str, join: str, file: Path) -> str:
        """Obtain a token and save it to the file; empty: the server gave none. Raises OSError, HTTPException."""
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Before asking the server: it gives a node's token once, and a token that cannot be saved is lost.
        descriptor, name = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)  # readable only by its owner
        try:
            text = self._ask(server, join)
            if text:
                os.write(descriptor, f"{text}\n".encode("ascii"))
                os.fsync(descriptor)
                Path(name).replace(file)
        finally:
            os.close(descriptor)
            Path(name).unlink(missing_ok=True)
        return text

    def _ask(self, server: str, join: str) -> str:
        connection = connect(server, self._trust, self._timeout_s, self._timeout_s)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {join}"}
            body = json.dumps({"node": self._node})
            connection.request("POST", path_on(server, PATH), body=body, headers=headers)
            answer = connection.getresponse()
            content = answer.read(ANSWER_BYTES_MAX)
        try:
            fields = json.loads(content)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            fields = {}
        text = fields.get("token")
        if answer.status == 201 and isinstance(text, str) and _is_token(text):
            return text
        detail = str(fields.get("detail", ""))[:300]
        self._say(f"node {self._node} cannot be enrolled: the server answered {answer.status}: {detail}".rstrip(": "))
        return ""

    def _read(self, file: Path | None) -> str:
        """Return the file's token; empty where it has none. A file yet to be created by a join token is no error."""
        if file is None:
            return ""
        try:
            with file.open(encoding="ascii") as lines:
                text = lines.read(TOKEN_CHARS_MAX + 2).strip()
        except FileNotFoundError:
            if file != self._file or self._join_file is None:
                self._say(f"token file {file} does not exist")
            return ""
        except (OSError, UnicodeDecodeError) as error:
            self._say(f"token file {file} cannot be read: {type(error).__name__}")
            return ""
        if text and not _is_token(text):
            self._say(f"token file {file} holds no token: expected one line of at most {TOKEN_CHARS_MAX} characters")
            return ""
        return text

    def _say(self, text: str) -> None:
        """Log an error once."""
        if text != self._said:
            self._said = text
            _log.warning("%s", text)


def _is_token(text: str) -> bool:
    return 0 < len(text) <= TOKEN_CHARS_MAX and text.isascii() and text.isprintable() and " " not in text
