"""This node's token: read from its file, and obtained with the fleet's join token where there is no valid one.

Touches: the two files, one short HTTP connection.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import math
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from eagle_eye.agent.transport.server_connection import Trust, connect, path_on
from eagle_eye.agent.transport.servers import Servers

PATH = "/api/v1/enrol"
TOKEN_CHARS_MAX = 256  # the server's limit
ANSWER_BYTES_MAX = 1 << 16
ENROL_EVERY_S = 60.0  # a fleet with an expired join token must not flood its server

_log = logging.getLogger("eagle_eye.agent")


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
