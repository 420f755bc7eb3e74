"""The agent's configuration and the defaults that depend on the host."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from eagle_eye.agent.hook_message import SYSTEM_FOLDER, default_socket
from eagle_eye.agent.spool import BYTES_MAX
from eagle_eye.schema.configuration import ConfigurationError, load
from eagle_eye.schema.frame import NAME_CHARS_MAX

SYSTEM_SPOOL = Path("/var/lib/eagle-eye-agent")
INTERVAL_S_MIN = 0.1
INTERVAL_S_MAX = 3600.0
SPOOL_BYTES_MIN = 1 << 20
SPOOL_BYTES_MAX = 1 << 40
TIMEOUT_S_MIN = 0.01
SOCKET_PATH_BYTES_MAX = 107  # the kernel's limit


class AgentConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """Every key of the agent's TOML file; the environment's names are ``EAGLE_EYE_`` and the key in capitals.

    ``node`` empty: the host's name. ``job`` empty: what the training processes say. ``token_file`` and
    ``ca_file`` empty: none. ``spool_dir`` and ``hook_socket`` empty: the default place. ``backoff_s_max`` is the
    longest wait between attempts to reach the server, ``connect_s`` and ``answer_s`` are timeouts.
    """

    server: str = "http://127.0.0.1:8470"
    node: str = ""
    job: str = ""
    token_file: str = ""
    ca_file: str = ""
    interval_s: float = 1.0
    spool_dir: str = ""
    spool_bytes_max: int = BYTES_MAX
    hook_socket: str = ""
    backoff_s_max: float = 5.0
    connect_s: float = 2.0
    answer_s: float = 5.0


def read(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> AgentConfiguration:
    """Return the configuration with the node's name filled in. Raises ConfigurationError naming the key."""
    configuration = load(AgentConfiguration, file, environ, flags)
    configuration = msgspec.structs.replace(configuration, node=configuration.node or socket.gethostname())
    _check(configuration)
    return configuration


def spool_folder(configuration: AgentConfiguration, environ: Mapping[str, str]) -> Path:
    """Return where frames wait: as configured, else the system's folder if we may write there, else the user's."""
    if configuration.spool_dir:
        return Path(configuration.spool_dir)
    place = SYSTEM_SPOOL if SYSTEM_SPOOL.exists() else SYSTEM_SPOOL.parent
    if os.access(place, os.W_OK | os.X_OK):
        return SYSTEM_SPOOL
    state = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME", "/")) / ".local/state")
    return Path(state) / "eagle-eye/agent"


def hook_socket_path(configuration: AgentConfiguration) -> Path:
    """Return where hooks find this agent. An agent of root makes the folder that every user's hook looks in."""
    if configuration.hook_socket:
        return Path(configuration.hook_socket)
    if os.geteuid() == 0:
        return SYSTEM_FOLDER / "hook.sock"
    return default_socket()


def _check(configuration: AgentConfiguration) -> None:
    _check_server(configuration.server)
    for key in ("node", "job"):
        text = getattr(configuration, key)
        if len(text) > NAME_CHARS_MAX or not text.isprintable() or not (text or key == "job"):
            raise ConfigurationError(f"{key}: expected 1 to {NAME_CHARS_MAX} printable characters, got {text[:80]!r}")
    for key, least, most in (
        ("interval_s", INTERVAL_S_MIN, INTERVAL_S_MAX),
        ("backoff_s_max", TIMEOUT_S_MIN, INTERVAL_S_MAX),
        ("connect_s", TIMEOUT_S_MIN, INTERVAL_S_MAX),
        ("answer_s", TIMEOUT_S_MIN, INTERVAL_S_MAX),
        ("spool_bytes_max", SPOOL_BYTES_MIN, SPOOL_BYTES_MAX),
    ):
        value = getattr(configuration, key)
        if not least <= value <= most:
            raise ConfigurationError(f"{key}: expected {least} to {most}, got {value}")
    for key in ("token_file", "ca_file"):
        name = getattr(configuration, key)
        if name and not os.access(name, os.R_OK):
            raise ConfigurationError(f"{key}: {name} cannot be read")
    path = hook_socket_path(configuration)
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigurationError(f"hook_socket: expected a path of at most {SOCKET_PATH_BYTES_MAX} bytes, got {path}")


def _check_server(server: str) -> None:
    expected = f"server: expected http://host:port or https://host:port, got {server!r}"
    parts = urlsplit(server)
    try:
        port = parts.port
    except ValueError:
        raise ConfigurationError(expected) from None
    if parts.username or parts.password:
        raise ConfigurationError("server: a URL with a password; put the token into a file and name it in token_file")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigurationError(expected)
