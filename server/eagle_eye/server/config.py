"""The server's configuration: one Struct whose fields are the keys of its TOML file."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from eagle_eye.schema import configuration
from eagle_eye.schema.configuration import ConfigurationError, open_to_others
from eagle_eye.server.accounts.trust import AccountSettings
from eagle_eye.server.delivery.attempts import WebhookSettings
from eagle_eye.server.engine.idle_faults import IdleCheckSettings
from eagle_eye.server.engine.settings import DetectionSettings, EvidenceSettings, PolicySettings
from eagle_eye.server.history import settings as remote_store
from eagle_eye.server.history.settings import HistorySettings, RemoteStoreSettings
from eagle_eye.server.ingest.settings import IdentitySettings, IngestSettings, RemoteWriteSettings
from eagle_eye.server.jobs import source as job_sources
from eagle_eye.server.jobs.source import JobSourceSettings
from eagle_eye.server.model import Count
from eagle_eye.server.security import settings as security
from eagle_eye.server.security.settings import LimitSettings, SignInSettings, TlsSettings
from eagle_eye.server.site_files import read_topology, with_racks
from eagle_eye.server.store import settings as records
from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.telemetry.settings import LogSettings


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The server's keys. ``data_dir`` "": ``~/.local/state/eagle-eye/server``; ``public_url`` "": ``<scheme>://<listen>``."""

    listen: str = "127.0.0.1:8470"
    data_dir: str = ""
    public_url: str = ""
    grafana_url: str = ""  # where browsers find the Grafana that has our dashboards; "": the page has no links to it
    series_max: Count = 200_000  # newest values shown on /metrics
    streams_max: Count = 64  # readers of /api/v1/events at a time
    topology_file: str = ""  # JSON with switch_of_node, switch_of_link, rack_of_node; "": not known
    detection: DetectionSettings = DetectionSettings()
    policy: PolicySettings = PolicySettings()
    webhooks: WebhookSettings = WebhookSettings()
    identity: IdentitySettings = IdentitySettings()
    ingest: IngestSettings = IngestSettings()
    remote_write: RemoteWriteSettings = RemoteWriteSettings()
    records: RecordsSettings = RecordsSettings()
    history: HistorySettings = HistorySettings()
    remote_store: RemoteStoreSettings = RemoteStoreSettings()
    evidence: EvidenceSettings = EvidenceSettings()
    limits: LimitSettings = LimitSettings()
    idle_checks: IdleCheckSettings = IdleCheckSettings()
    accounts: AccountSettings = AccountSettings()
    log: LogSettings = LogSettings()
    tls: TlsSettings = TlsSettings()
    sign_in: SignInSettings = SignInSettings()
    job_sources: JobSourceSettings = JobSourceSettings()


def load(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> ServerConfig:
    """Return the configuration with ``data_dir``, ``public_url`` and the racks that policy names filled in.

    Raises ConfigurationError.
    """
    config = configuration.load(ServerConfig, file, environ, flags)
    address(config.listen)
    if config.public_url and not config.public_url.startswith(("http://", "https://")):
        raise ConfigurationError(f"public_url: expected an http:// or https:// URL, got {config.public_url!r}")
    if config.grafana_url:
        _check_base(config.grafana_url)
    if config.topology_file:
        read_topology(Path(config.topology_file))
    job_sources.check_settings(config.job_sources)
    data_dir = str(Path(config.data_dir).expanduser() if config.data_dir else default_data_dir(environ))
    if not config.tls.certificate_file and (config.tls.key_file or config.tls.client_ca_file):
        raise ConfigurationError("tls.certificate_file: expected a file, since other keys of [tls] are set; got none")
    records.check(config.records)
    remote_store.check(config.remote_store)
    scheme = "https" if config.tls.certificate_file else "http"
    public_url = (config.public_url or f"{scheme}://{config.listen}").rstrip("/")
    security.check(config.sign_in, config.tls, public_url, config.history.records_retention_s)
    policy = with_racks(config.policy, config.topology_file)
    grafana_url = config.grafana_url.rstrip("/")
    filled = {"data_dir": data_dir, "public_url": public_url, "grafana_url": grafana_url, "policy": policy}
    return msgspec.structs.replace(config, **filled)


def _check_base(url: str) -> None:
    """Raise ConfigurationError unless paths can be added to the URL: the page makes links of it."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        whole = False
    if not whole or re.search(r"[?#@\s]", url):
        raise ConfigurationError(
            f"grafana_url: expected an http:// or https:// URL without credentials, query and fragment, got {url!r}"
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


def plain_text(config: ServerConfig) -> str:
    """Return what is wrong with an address without TLS; "" where no other machine reaches it or a proxy adds TLS."""
    if config.tls.certificate_file or is_loopback(config.listen) or config.public_url.startswith("https://"):
        return ""
    return (
        f"{config.listen} can be reached from other machines and has no TLS: who is on the way reads tokens and can use"
        " them; set tls.certificate_file, or public_url to the https:// address of the proxy that adds it"
    )


def exposed_secrets(config: ServerConfig) -> list[str]:
    """Return one line for each configured file of a secret that every user of this machine can read.

    Kubernetes sets the mode of a service account's token, so that one is left out.
    """
    tls, store, sign_in = config.tls, config.remote_store, config.sign_in
    key_of_key = "tls.key_file" if tls.key_file else "tls.certificate_file"
    files = {
        key_of_key: tls.key_file or tls.certificate_file,
        "records.password_file": config.records.password_file,
        "remote_store.bearer_token_file": store.bearer_token_file,
        "remote_store.basic_auth_password_file": store.basic_auth_password_file,
        "sign_in.proxy.secret_file": sign_in.proxy.secret_file,
        "sign_in.provider.client_secret_file": sign_in.provider.client_secret_file,
        "job_sources.slurm.token_file": config.job_sources.slurm.token_file,
    }
    return [line for key, file in files.items() if file and (line := open_to_others(key, Path(file)))]
