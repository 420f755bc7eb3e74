"""Settings for the remote store of the long history."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.history.settings import HistorySettings

SEGMENT_S = 300.0  # the store receives segments, and should not be further behind than this


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
    """Raise ConfigurationError unless the settings are consistent."""
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
    return msgspec.structs.replace(history, segment_s=min(history.segment_s, SEGMENT_S))
