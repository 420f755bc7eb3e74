"""The target server: its address, its certificate, and the head of every request."""

from __future__ import annotations

import ipaddress
import ssl
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from eagle_eye.schema.configuration import ConfigurationError

FRAMES_PATH = "/api/v1/frames"
ENROL_PATH = "/api/v1/enrol"
PORTS_PER_ADDRESS = 500  # connections from one source address: a server bounds those of one
_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain"})


class LoadTarget(NamedTuple):
    """A server by its URL; ``ssl`` None: plain HTTP."""

    url: str
    host: str
    port: int
    prefix: str
    ssl: ssl.SSLContext | None

    @property
    def is_loopback(self) -> bool:
        """Whether the server is on this machine and can be reached from it alone."""
        return _is_loopback(self.host)

    def head(self, path: str, content_type: str, token: str) -> bytes:
        """Return a request's head up to the value of Content-Length; ``token`` "": none is sent."""
        netloc = urlsplit(self.url).netloc.rpartition("@")[2]
        lines = [
            f"POST {self.prefix}{path} HTTP/1.1",
            f"Host: {netloc}",
            f"Content-Type: {content_type}",
            "Accept: application/json",
            *([f"Authorization: Bearer {token}"] if token else []),
            "Content-Length: ",
        ]
        return "\r\n".join(lines).encode("ascii")

    def source(self, connection: int) -> tuple[str, int] | None:
        """Return the address that a connection comes from; None: the system chooses.

        Agents have an address each, and a server bounds what one may do.
        """
        try:
            loopback = ipaddress.IPv4Address(self.host).is_loopback
        except ValueError:
            return None
        return (f"127.0.0.{2 + connection // PORTS_PER_ADDRESS % 250}", 0) if loopback else None


def target(url: str, ca_file: Path | None = None) -> LoadTarget:
    """Return the server of a URL. Raises ConfigurationError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigurationError(f"--server: {url!r} is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"--server: expected a URL such as http://127.0.0.1:8470, got {url!r}")
    context = None
    if parts.scheme == "https":
        try:
            context = ssl.create_default_context(cafile=ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(f"--ca-file: {ca_file} cannot be used: {error}") from None
    return LoadTarget(url, parts.hostname, port or (443 if context else 80), parts.path.rstrip("/"), context)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in _LOOPBACK_NAMES
