"""The server's configuration: one Struct whose fields are the keys of its TOML file."""

from __future__ import annotations

import fnmatch
import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from eagle_eye.schema import configuration
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.frame import REQUEST_BYTES_MAX
from eagle_eye.server.engine.idle_checks import IdleCheckSettings
from eagle_eye.server.engine.settings import DetectionSettings, PolicySettings
from eagle_eye.server.errors import Refusal
from eagle_eye.server.job_sources import settings as job_sources
from eagle_eye.server.job_sources.settings import JobSourceSettings
from eagle_eye.server.node_groups import with_racks
from eagle_eye.server.topology_file import read_topology

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]


class WebhookSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How deliveries are attempted. Delays double from ``backoff_base_s`` to ``backoff_max_s``, with full jitter."""

    allow_private: bool = False  # whether targets may be loopback, private or link-local addresses
    timeout_s: Positive = 10.0  # for one attempt, from connecting to the answer's end
    attempts_max: Count = 20
    backoff_base_s: Positive = 1.0
    backoff_max_s: Positive = 3600.0
    heartbeat_s: NotNegative = 60.0  # 0: no heartbeat
    concurrency_per_subscription: Count = 16  # in flight; four more are kept for actions
    target_concurrency: Count = 32  # in flight to one host and port; one subscription takes half
    target_requests_per_s: Positive = 50.0  # likewise
    target_burst: Count = 100  # what may go there at once after a rest
    pending_max: Count = 10_000  # per subscription; beyond it the oldest fail with "backlog"
    subscriptions_max: Count = 100
    rotation_overlap_s: NotNegative = 86_400.0  # how long a replaced secret still signs
    disable_after_s: NotNegative = 0.0  # a subscription of which nothing arrived for so long ends; 0: never
    alert_refresh_s: Annotated[float, Meta(ge=1, le=3_600)] = 60.0  # how often an Alertmanager is told what still fires
    runbook_url: str = ""  # the runbook_url of alerts, "{fault}" is replaced; "": none


class IngestSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who may send frames and how much. ``nodes`` are glob patterns of allowed node names; []: any."""

    nodes: list[str] = []
    # Nodes that somebody vouches for, and as many again of others: bounds memory and labels.
    nodes_max: Count = 20_000
    body_bytes_max: Annotated[int, Meta(ge=1024, le=REQUEST_BYTES_MAX)] = REQUEST_BYTES_MAX
    body_timeout_s: Positive = 30.0  # for a request's body to arrive
    pending_bytes_max: Count = 256 << 20  # frames that may wait for the disk before agents are told to come back
    fresh_s: Positive = 30.0  # the server counts as blind when no agent was heard for this long

    def check_name(self, node: str) -> None:
        """Return if a node of this name may send frames. Raises Refusal 403."""
        if self.nodes and not any(fnmatch.fnmatchcase(node, pattern) for pattern in self.nodes):
            raise Refusal(403, "node", f"node {node!r} is in no pattern of ingest.nodes; add it there")


class RemoteWriteSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What Prometheus may send, and which labels name a node and its job: the first of them that a series has."""

    # Of "instance" the port is cut off.
    node_labels: tuple[str, ...] = ("eagle_eye_node", "Hostname", "hostname", "node", "instance")
    job_labels: tuple[str, ...] = ("eagle_eye_job",)
    body_bytes_max: Annotated[int, Meta(ge=1024, le=64 << 20)] = 8 << 20
    decompressed_bytes_max: Annotated[int, Meta(ge=1024, le=256 << 20)] = 16 << 20
    request_series_max: Count = 20_000  # of one request; Prometheus sends 2,000
    series_max: Count = 1_000_000  # known at a time, half a kilobyte each
    token_nodes_max: Annotated[int, Meta(ge=0)] = 4_096  # that a token may name while nobody vouches for them


class RemoteStoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A Prometheus-compatible store that keeps the long history; ``write_url`` or ``read_url`` "": not used for that.

    Credentials go with both URLs.
    """

    write_url: str = ""  # where remote write goes: http://prometheus:9090/api/v1/write
    read_url: str = ""  # what stands before /api/v1/query: http://prometheus:9090
    headers: dict[str, str] = {}
    bearer_token_file: str = ""
    basic_auth_user: str = ""
    basic_auth_password_file: str = ""
    ca_file: str = ""  # whose certificates are trusted; "": those that the system trusts
    external_labels: dict[str, str] = {}  # on every series that is written, and asked for when reading
    metrics: tuple[str, ...] = ("*",)  # globs of the metrics that are written
    interval_s: Annotated[float, Meta(ge=0, le=3_600)] = 15.0  # one sample of each series in it, the last; 0: all
    request_samples_max: Annotated[int, Meta(ge=1, le=100_000)] = 5_000
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 30.0  # for one request
    answer_bytes_max: Annotated[int, Meta(ge=1 << 20, le=1 << 30)] = 64 << 20  # of one answer that is read


class HistorySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much of the past is kept: at most ``retention_s`` and at most ``retention_bytes``, of each level its own."""

    segment_s: Annotated[float, Meta(ge=10, le=3_600)] = 300.0  # what was received in this time becomes segments
    retention_s: Positive = 7 * 86_400.0
    retention_bytes: Annotated[int, Meta(ge=1 << 20)] = 20 << 30
    minutes_retention_s: Positive = 90 * 86_400.0  # downsampled to a minute
    minutes_retention_bytes: Annotated[int, Meta(ge=1 << 20)] = 10 << 30
    hours_retention_s: Positive = 730 * 86_400.0  # downsampled to an hour
    hours_retention_bytes: Annotated[int, Meta(ge=1 << 20)] = 5 << 30
    merge_below_bytes: Annotated[int, Meta(ge=0, le=64 << 20)] = 4 << 20  # smaller segments are merged; 0: none
    replay_frames_max: Count = 500_000  # newest frames read back into the window at start
    query_frames_max: Count = 100_000  # frames that one query may read
    records_retention_s: Positive = 90 * 86_400.0  # delivered events and their deliveries


class EvidenceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is gathered on the suspects' hosts before an action stops their job, and how much of it is kept."""

    ask: bool = True  # whether agents are asked without a person; by hand it works either way
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 5.0  # an action is held back for so long at most; 0: never
    within_s: Annotated[float, Meta(ge=0.5, le=60)] = 3.0  # what agents are given; with the way there below wait_s
    nodes_max: Count = 32  # asked because of one incident
    bundle_bytes_max: Annotated[int, Meta(ge=1024, le=1 << 30)] = 64 << 20
    upload_s: Positive = 120.0  # for one bundle to arrive
    folder_bytes_max: Annotated[int, Meta(ge=1 << 20)] = 10 << 30  # of all bundles; beyond it the oldest go
    bundles_max: Count = 5_000
    retention_s: Positive = 30 * 86_400.0


class LimitSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How often somebody may ask; a burst is what may come at once after a rest. Frames count by token alone."""

    agent_requests_per_s: Positive = 20.0  # of each agent's token: twice what the fastest agent sends
    agent_burst: Count = 100
    token_requests_per_s: Positive = 50.0  # of each other token, but for frames and join tokens
    token_burst: Count = 500
    address_requests_per_s: Positive = 200.0  # of each client's address, but for frames: a proxy has one for a fleet
    address_burst: Count = 2_000
    remote_write_requests_per_s: Positive = 2_000.0  # of each token; Prometheus sends some 2,000 samples a request
    remote_write_burst: Count = 10_000
    # Of each client's address: what is no request, or telemetry of nobody who is known. Beyond it its connections end.
    bad_requests_per_s: Positive = 100.0
    bad_burst: Count = 1_000
    connections: Count = 50_000  # at a time, as far as the process may open files
    address_connections: Count = 4_096  # of each client's address, of those on which nobody proved who he is
    head_timeout_s: Positive = 30.0  # for a request's head to arrive, and for a new connection's first


class AccountSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the past is counted, and how long what is counted is kept."""

    # How long after what would have been done it is looked at what happened.
    hindsight_s: Annotated[float, Meta(ge=3_600, le=30 * 86_400)] = 2 * 86_400.0
    # Attempts, tickets, driver errors, and GPUs that are no longer heard of.
    retention_s: Annotated[float, Meta(ge=60 * 86_400)] = 400 * 86_400.0


class LogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is logged to stderr, each event one line."""

    format: Literal["console", "json"] = "console"
    level: Literal["debug", "info", "warning", "error"] = "info"


class TlsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Files in PEM, read again when they change. ``certificate_file`` "": plain HTTP."""

    certificate_file: str = ""  # the server's, with its chain
    key_file: str = ""  # "": the key is in certificate_file
    client_ca_file: str = ""  # whose certificates clients show; "": they are asked for none
    client_certificates: Literal["agents", "all"] = "agents"  # who must show one; an agent's names its node


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The server's keys. ``data_dir`` "": ``~/.local/state/eagle-eye/server``; ``public_url`` "": ``<scheme>://<listen>``."""

    listen: str = "127.0.0.1:8470"
    data_dir: str = ""
    public_url: str = ""
    series_max: Count = 200_000  # newest values shown on /metrics
    streams_max: Count = 64  # readers of /api/v1/events at a time
    topology_file: str = ""  # JSON with switch_of_node, switch_of_link, rack_of_node; "": not known
    detection: DetectionSettings = DetectionSettings()
    policy: PolicySettings = PolicySettings()
    webhooks: WebhookSettings = WebhookSettings()
    ingest: IngestSettings = IngestSettings()
    remote_write: RemoteWriteSettings = RemoteWriteSettings()
    history: HistorySettings = HistorySettings()
    remote_store: RemoteStoreSettings = RemoteStoreSettings()
    evidence: EvidenceSettings = EvidenceSettings()
    limits: LimitSettings = LimitSettings()
    idle_checks: IdleCheckSettings = IdleCheckSettings()
    accounts: AccountSettings = AccountSettings()
    log: LogSettings = LogSettings()
    tls: TlsSettings = TlsSettings()
    job_sources: JobSourceSettings = JobSourceSettings()


def load(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> ServerConfig:
    """Return the configuration with ``data_dir``, ``public_url`` and the racks that policy names filled in.

    Raises ConfigurationError.
    """
    config = configuration.load(ServerConfig, file, environ, flags)
    address(config.listen)
    if config.public_url and not config.public_url.startswith(("http://", "https://")):
        raise ConfigurationError(f"public_url: expected an http:// or https:// URL, got {config.public_url!r}")
    if config.topology_file:
        read_topology(Path(config.topology_file))
    job_sources.check(config.job_sources)
    data_dir = str(Path(config.data_dir).expanduser() if config.data_dir else default_data_dir(environ))
    if not config.tls.certificate_file and (config.tls.key_file or config.tls.client_ca_file):
        raise ConfigurationError("tls.certificate_file: expected a file, since other keys of [tls] are set; got none")
    _check_remote_store(config.remote_store)
    scheme = "https" if config.tls.certificate_file else "http"
    public_url = (config.public_url or f"{scheme}://{config.listen}").rstrip("/")
    policy = with_racks(config.policy, config.topology_file)
    return msgspec.structs.replace(config, data_dir=data_dir, public_url=public_url, policy=policy)


def _check_remote_store(store: RemoteStoreSettings) -> None:
    """Return if the keys make sense together. Raises ConfigurationError."""
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


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """Return where the server's state lies unless configured: the user's state folder (XDG)."""
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "eagle-eye" / "server"


def address(listen: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[v6]:port". Raises ConfigurationError."""
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ConfigurationError(f"listen: expected HOST:PORT such as 127.0.0.1:8470, got {listen!r}")
    return host, int(port)


def is_loopback(listen: str) -> bool:
    """Return whether only this machine can reach the address; a name other than localhost counts as reachable."""
    host, _ = address(listen)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


__all__ = [
    "AccountSettings",
    "ConfigurationError",
    "EvidenceSettings",
    "HistorySettings",
    "IdleCheckSettings",
    "IngestSettings",
    "LimitSettings",
    "LogSettings",
    "RemoteStoreSettings",
    "RemoteWriteSettings",
    "ServerConfig",
    "TlsSettings",
    "WebhookSettings",
    "address",
    "default_data_dir",
    "is_loopback",
    "load",
]
