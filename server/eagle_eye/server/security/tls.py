"""TLS with files that may change while the server runs. Touches: the certificate files.

Open connections keep their certificate; each new one uses the newest valid files. A client certificate does not replace
the token: an agent needs both, for the same node.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import math
import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from uvicorn.protocols.http.h11_impl import H11Protocol

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from eagle_eye.server.model.clock import Clock, rfc3339
from eagle_eye.server.security.auth import CERTIFICATE_NAMES, PEER
from eagle_eye.server.security.settings import TlsSettings

# The validity period of certificates in a PEM file (RFC 5280, section 4.1.2.5).

_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME, _GENERALIZED_TIME = 0xA0, 0x17, 0x18  # DER tags
_CENTURY_PIVOT = 50  # of two-digit years: 50 is 1950, 49 is 2049


class Validity(NamedTuple):
    """A certificate's validity period in Unix seconds."""

    begins_s: float
    ends_s: float


def first_to_end(pem: str) -> Validity | None:
    """Return the validity of the first certificate to expire in a PEM chain; None where no dates can be read."""
    return min(
        (found for text in _CERTIFICATE.findall(pem) if (found := _validity_of(text)) is not None),
        key=lambda validity: validity.ends_s,
        default=None,
    )


def _validity_of(pem: str) -> Validity | None:
    try:
        der = ssl.PEM_cert_to_DER_cert(pem)
        _, certificate, _ = _der_element(der, 0)
        _, signed, _ = _der_element(certificate, 0)
        tag, _, at = _der_element(signed, 0)
        # The validity comes after the version (absent in version 1), serial number, algorithm and issuer.
        for _ in range(3 if tag == _VERSION else 2):
            at = _der_element(signed, at)[2]
        _, dates, _ = _der_element(signed, at)
        tag, begins, at = _der_element(dates, 0)
        begins_s = _der_time(tag, begins)
        tag, ends, _ = _der_element(dates, at)
        return Validity(begins_s, _der_time(tag, ends))
    except (IndexError, ValueError):
        return None


def _der_element(der: bytes, at: int) -> tuple[int, bytes, int]:
    """Return the tag and content of the element at ``at``, and the next one's position. Raises IndexError."""
    tag, length, begin = der[at], der[at + 1], at + 2
    if length >= 0x80:
        wide = length - 0x80
        length, begin = int.from_bytes(der[begin : begin + wide], "big"), begin + wide
    if begin + length > len(der):
        raise IndexError(at)
    return tag, der[begin : begin + length], begin + length


def _der_time(tag: int, content: bytes) -> float:
    """Return a date as Unix seconds. Raises ValueError."""
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if int(text[:2]) >= _CENTURY_PIVOT else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError(tag)
    return dt.datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=dt.timezone.utc).timestamp()


# The files.

POLL_S = 10.0  # how often a running server checks whether the files changed
DAY_S = 86_400.0
# Expiry is reported this long before, or for short-lived certificates in the last third of their life: renewal
# is due then, and has failed.
WARN_S = 14 * DAY_S
WARN_SHARE = 1 / 3

_log = logging.getLogger(__name__)


class Certificates:
    """TLS contexts from the files. ``context`` is the one to listen with; it hands each handshake to the newest.

    ``current`` is whether the newest files are in use, ``validity`` the validity period of the certificate in use, None
    if unreadable. Raises ConfigurationError when the files are unusable.
    """

    def __init__(self, settings: TlsSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._warned_s = -math.inf
        self._files = [
            Path(name) for name in (settings.certificate_file, settings.key_file, settings.client_ca_file) if name
        ]
        self._seen = self._look()
        self._newest = read(settings)
        self._problem = ""
        self.validity = _validity(settings)
        self.context = read(settings)
        self.context.sni_callback = self._hand_over

    @property
    def current(self) -> bool:
        """Whether the newest files are in use."""
        return not self._problem

    def ending(self) -> str:
        """Return a message that the certificate in use has expired or soon will, else ""."""
        if self.validity is None:
            return ""
        begins_s, ends_s = self.validity
        left_s = ends_s - self._clock.now_s()
        if left_s >= min(WARN_S, WARN_SHARE * (ends_s - begins_s)):
            return ""
        when = f"in {left_s / DAY_S:.1f} days" if left_s > 0 else "ago: nobody who checks it connects any more"
        file = self._settings.certificate_file
        return f"the certificate in {file}, or one of its chain, ends {rfc3339(ends_s)}, {when}; put a new one there"

    def poll(self) -> None:
        """Reread the files if they changed; unusable ones are logged and change nothing.

        Once a day, also logs that the certificate in use expires soon.
        """
        self._read_changed()
        ending, now_s = self.ending(), self._clock.monotonic_s()
        if ending and now_s - self._warned_s >= DAY_S:
            self._warned_s = now_s
            _log.warning("the server's certificate has to be renewed", extra={"why": ending})

    def _read_changed(self) -> None:
        seen = self._look()
        if seen == self._seen and not self._problem:
            return
        try:
            self._newest = read(self._settings)
        except ConfigurationError as error:
            # Retried at each poll: a certificate may be written before its key.
            if str(error) != self._problem:
                self._problem = str(error)
                _log.error("the changed certificate is not used, the one before stays", extra={"error": str(error)})
            return
        self._seen, self._problem = seen, ""
        self.validity, self._warned_s = _validity(self._settings), -math.inf
        _log.info("the certificate was read", extra={"certificate_file": self._settings.certificate_file})

    async def follow(self, poll_s: float = POLL_S) -> None:
        """Poll until cancelled."""
        while True:
            await asyncio.sleep(poll_s)
            await asyncio.to_thread(self.poll)

    def _hand_over(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._newest

    def _look(self) -> tuple[object, ...]:
        return tuple(_identity(path) for path in self._files)


class PeerProtocol(H11Protocol):
    """Passes the client's address and the names in its certificate to the application in ``scope["state"]``."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection whose handshake is complete."""
        super().connection_made(transport)
        certified, peer = names(transport.get_extra_info("peercert")), transport.get_extra_info("peername")
        self.app_state = {**self.app_state, CERTIFICATE_NAMES: certified, PEER: peer[0] if peer else ""}


def read(settings: TlsSettings) -> ssl.SSLContext:
    """Return a context from the files as they are now. Raises ConfigurationError naming the key and the file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    # A resumed session would readmit a client whose certificate is no longer accepted.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    try:
        # Without a password given, OpenSSL would prompt for it on the terminal.
        context.load_cert_chain(settings.certificate_file, settings.key_file or None, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise _unusable("certificate_file", settings.certificate_file, error) from None
    if settings.client_ca_file:
        try:
            context.load_verify_locations(settings.client_ca_file)
        except (OSError, ValueError) as error:
            raise _unusable("client_ca_file", settings.client_ca_file, error) from None
        everybody = settings.client_certificates == "all"
        context.verify_mode = ssl.CERT_REQUIRED if everybody else ssl.CERT_OPTIONAL
    return context


def names(certificate: dict[str, Any] | None) -> frozenset[str]:
    """Return the common name and DNS names of what getpeercert() returned; empty for no certificate."""
    if not certificate:
        return frozenset()
    common = {value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"}
    return frozenset(common | {value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"})


def _validity(settings: TlsSettings) -> Validity | None:
    try:
        return first_to_end(Path(settings.certificate_file).read_text(encoding="latin-1"))
    except OSError:  # it existed a moment ago; the next poll reports it
        return None


def _unusable(key: str, file: str, error: Exception) -> ConfigurationError:
    why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    remedy = "expected PEM with the chain and, there or in tls.key_file, its key" if key == "certificate_file" else ""
    return ConfigurationError(f"tls.{key}: {file} cannot be used: {why}; {remedy or 'expected certificates in PEM'}")


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class CertificateCollector(Collector):
    """Whether the newest files are in use, and when the certificate in use expires, read when scraped."""

    def __init__(self, certificates: Certificates) -> None:
        self._certificates = certificates

    def collect(self) -> Iterator[Metric]:
        """Yield the families; the expiry only if it can be read from the file."""
        yield GaugeMetricFamily(
            PROMETHEUS_PREFIX + "tls_reload_success",
            "1 when the newest certificate files are in use.",
            value=self._certificates.current,
        )
        validity = self._certificates.validity
        if validity is not None:
            yield GaugeMetricFamily(
                PROMETHEUS_PREFIX + "tls_certificate_expires_timestamp_seconds",
                "When the certificate in use ends, or the one of its chain that ends before it.",
                value=validity.ends_s,
            )
