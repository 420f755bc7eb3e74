"""Settings for how much history is kept, and for the remote store of the long history."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.model import Count, Positive


class HistorySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much history is kept: at most ``retention_s`` and ``retention_bytes``, with separate limits per level."""

    segment_s: Annotated[float, Meta(ge=10, le=3_600)] = 1_800.0  # received frames become segments after this time
    retention_s: Positive = 7 * 86_400.0
    retention_bytes: Annotated[int, Meta(ge=1 << 20)] = 20 << 30
    minutes_retention_s: Positive = 730 * 86_400.0  # downsampled to a minute
    minutes_retention_bytes: Annotated[int, Meta(ge=1 << 20)] = 15 << 30
    hours_retention_s: Positive = 730 * 86_400.0  # downsampled to an hour, by earlier versions only
    hours_retention_bytes: Annotated[int, Meta(ge=1 << 20)] = 5 << 30
    merge_below_bytes: Annotated[int, Meta(ge=0, le=64 << 20)] = 4 << 20  # of earlier versions; has no effect
    replay_frames_max: Count = 500_000  # newest frames replayed into the detection window at start
    query_frames_max: Count = 100_000  # frames that one query may read; ten minutes of a node count as one
    records_retention_s: Positive = 90 * 86_400.0  # delivered events and their deliveries


def of_earlier_versions(settings: HistorySettings) -> list[str]:
    """Return a line about each key that is set but has no effect, or only on data of earlier versions."""
    plain = HistorySettings()
    return [
        f"history.{key} = {getattr(settings, key)!r} {what}"
        for key, what in _OF_EARLIER_VERSIONS.items()
        if getattr(settings, key) != getattr(plain, key)
    ]


_ONLY_LEFT = "limits only the hours that an earlier version left: minutes alone are made now, see minutes_retention"
_OF_EARLIER_VERSIONS = {
    "merge_below_bytes": "has no effect: segments are not merged any more; remove it",
    "hours_retention_s": f"{_ONLY_LEFT}_s",
    "hours_retention_bytes": f"{_ONLY_LEFT}_bytes",
}


REMOTE_SEGMENT_S = 300.0  # the remote store receives segments, and should not be further behind than this


class RemoteStoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A Prometheus-compatible store for the long history; ``write_url`` or ``read_url`` "" disables that direction.

    Credentials are sent to both URLs.
    """

    write_url: str = ""  # remote write endpoint: http://prometheus:9090/api/v1/write
    read_url: str = ""  # base URL before /api/v1/query: http://prometheus:9090
    headers: dict[str, str] = {}
    bearer_token_file: str = ""
    basic_auth_user: str = ""
    basic_auth_password_file: str = ""
    ca_file: str = ""  # CA certificates to trust; "": those of the system
    external_labels: dict[str, str] = {}  # added to every written series, and required when reading
    metrics: tuple[str, ...] = ("*",)  # globs of the metrics that are written
    interval_s: Annotated[float, Meta(ge=0, le=3_600)] = 15.0  # each series' last sample per interval is sent; 0: all
    request_samples_max: Annotated[int, Meta(ge=1, le=100_000)] = 5_000
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 30.0  # for one request
    answer_bytes_max: Annotated[int, Meta(ge=1 << 20, le=1 << 30)] = 64 << 20  # size of one answer


def check(store: RemoteStoreSettings) -> None:
    """Raise ConfigurationError unless the remote store's settings are consistent."""
    for key, url in (("write_url", store.write_url), ("read_url", store.read_url)):
        if url and not url.startswith(("http://", "https://")):
            raise ConfigurationError(f"remote_store.{key}: expected an http:// or https:// URL, got {url!r}")
        if "@" in urlsplit(url).netloc:  # not repeated here, and in no log later
            raise ConfigurationError(
                f"remote_store.{key}: expected no user and password in the URL;"
                " set basic_auth_user and basic_auth_password_file"
            )
    if store.bearer_token_file and store.basic_auth_user:
        raise ConfigurationError("remote_store.basic_auth_user: expected none beside bearer_token_file, got both")
    if store.basic_auth_password_file and not store.basic_auth_user:
        raise ConfigurationError("remote_store.basic_auth_user: expected a name beside basic_auth_password_file")
    for name in store.external_labels:
        if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", name) or name in ("__name__", "job", "node", "device", "link"):
            raise ConfigurationError(
                f"remote_store.external_labels: expected labels beside job, node, device and link, got {name!r}"
            )


def fed_from(history: HistorySettings, store: RemoteStoreSettings) -> HistorySettings:
    """Return the history's settings with segments at least as frequent as a store that is written to needs them."""
    if not store.write_url:
        return history
    return msgspec.structs.replace(history, segment_s=min(history.segment_s, REMOTE_SEGMENT_S))
