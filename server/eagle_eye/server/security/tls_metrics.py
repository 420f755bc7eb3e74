"""The server's certificate on ``/metrics``; nothing without TLS."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from eagle_eye.server.security.tls import Certificates


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
