"""An HTTP connection to the server, with timeouts and the site's certificates. Touches: the network."""

from __future__ import annotations

import http.client
import ssl
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
