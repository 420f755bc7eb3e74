"""An HTTP connection to the server, with deadlines and the site's certificates. Touches: the network."""

from __future__ import annotations

import http.client
import ssl
from pathlib import Path
from urllib.parse import urlsplit


def connect(server: str, ca_file: Path | None, connect_s: float, answer_s: float) -> http.client.HTTPConnection:
    """Return an open connection; reads and writes on it time out after ``answer_s``. Raises OSError.

    ``ca_file`` None: the system's certificates. No proxy of the environment's is used: it would get the token.
    """
    parts = urlsplit(server)
    host = parts.hostname or ""
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=ca_file)
        connection = http.client.HTTPSConnection(host, parts.port, timeout=connect_s, context=context)
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=connect_s)
    connection.connect()
    connection.sock.settimeout(answer_s)
    return connection


def path_on(server: str, path: str) -> str:
    """Return the path of a request: the server may live below a prefix."""
    return urlsplit(server).path.rstrip("/") + path
