"""What the server tells the sender, and what it hears of it. Pure."""

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
        """Return what stays the same as long as a segment gives the same moments."""
        said = msgspec.json.encode((sorted(self.external_labels.items()), self.metrics, self.interval_s))
        return hashlib.sha256(said).hexdigest()[:16]


class SenderReport(msgspec.Struct, frozen=True, kw_only=True):
    """A line of standard output: what happened since the last one.

    ``refused`` counts samples by reason, ``retries`` attempts; ``lost`` segments by reason. ``problem`` None: no word
    on it, "": there is none any more.
    """

    taken: int = 0
    refused: dict[str, int] = {}
    complaint: str = ""
    retries: dict[str, int] = {}
    lost: dict[str, int] = {}
    problem: str | None = None
