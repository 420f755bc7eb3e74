"""Messages from the server to the sender process and back. Pure."""

from __future__ import annotations

import fnmatch
import hashlib

import msgspec

from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from eagle_eye.server.history.remote_store.credentials import Access


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to send, and where to."""

    url: str
    access: Access
    external_labels: dict[str, str]
    metrics: tuple[str, ...]  # globs
    interval_s: float
    request_samples_max: int
    timeout_s: float

    def wants(self, metric: str) -> bool:
        """Return whether a metric of the catalogue is sent; globs name it with or without the prefix."""
        names = (metric, PROMETHEUS_PREFIX + metric)
        return any(fnmatch.fnmatchcase(name, glob) for glob in self.metrics for name in names)

    def cut(self) -> str:
        """Return a text that is equal as long as a segment gives the same moments."""
        said = msgspec.json.encode((sorted(self.external_labels.items()), self.metrics, self.interval_s))
        return hashlib.sha256(said).hexdigest()[:16]


class SenderReport(msgspec.Struct, frozen=True, kw_only=True):
    """A line of standard output: what happened since the previous one.

    ``refused`` counts samples by reason, ``retries`` attempts, ``lost`` segments by reason. ``problem`` is None if
    unchanged and "" if it is over.
    """

    taken: int = 0
    refused: dict[str, int] = {}
    complaint: str = ""
    retries: dict[str, int] = {}
    lost: dict[str, int] = {}
    problem: str | None = None
