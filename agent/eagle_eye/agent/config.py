"""The agent's configuration and the defaults that depend on the host."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from eagle_eye.agent import exposition as metrics_server
from eagle_eye.agent.collectors import dcgm_exporter, nccl_ras
from eagle_eye.agent.collectors.tensorboard import event_files
from eagle_eye.agent.training_hook.message import SYSTEM_FOLDER, default_socket
from eagle_eye.agent.training_logs.followed_logs import Pattern
from eagle_eye.agent.training_logs.frameworks import FRAMEWORKS, expected
from eagle_eye.agent.training_logs.lines import Framework
from eagle_eye.agent.transport.servers import Trust, place
from eagle_eye.agent.transport.spool import BYTES_MAX
from eagle_eye.agent.transport.spool_files import KEEP_S
from eagle_eye.schema.configuration import ConfigurationError, load, open_to_others
from eagle_eye.schema.names import NAME_CHARS_MAX

SYSTEM_SPOOL = Path("/var/lib/eagle-eye-agent")
INTERVAL_S_MIN = 0.1
INTERVAL_S_MAX = 3600.0
DEFAULT_SERVER = "http://127.0.0.1:8470"
SERVERS_MAX = 8
SPOOL_BYTES_MIN = 1 << 20
SPOOL_BYTES_MAX = 1 << 40
SPOOL_KEEP_S_MAX = 3600.0
TIMEOUT_S_MIN = 0.01
SOCKET_PATH_BYTES_MAX = 107  # the kernel's limit
PLACES_MAX = 16  # of each kind: all are scanned repeatedly
PORTS_MAX = 8
GPUS_MAX = 1_024
WORDS_MAX = 32
WORD_CHARS_MAX = 4_096

_PLACES = (
    "nccl_inspector_folders",
    "flight_recorder_prefixes",
    "flight_recorder_pipe_prefixes",
    "training_logs",
    "tensorboard_logs",
)


class AgentConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """Every key of the agent's TOML file; the environment's names are ``EAGLE_EYE_`` and the key in capitals.

    ``server`` None and ``servers`` empty: this host's. ``node`` empty: the host's name. ``job`` empty: the training
    processes' own. ``token_file``, ``ca_file`` and ``certificate_file`` empty: none; with a ``join_token_file`` the
    token is obtained once and kept in ``token_file``, or beside the spool. ``spool_dir`` and ``hook_socket`` empty: the
    default place. ``spool_keep_s`` is how long acknowledged frames are kept for a server that lacks them, 0: not.
    ``backoff_s_max`` is the longest wait between attempts to reach the server, ``connect_s`` and ``answer_s`` are
    timeouts. ``metrics_listen`` and ``dcgm_exporter`` empty: off. ``shared_host``: several agents run
    here, each for processes that name its node. ``node_check_command`` empty: active checks are disabled.
    ``nvrx_health_socket`` empty: NVRx's health checks are not served; ``nvrx_health_gpus``: how many GPUs a healthy
    host has, -1: unknown. The other lists add to the training processes' own environments.
    """

    server: str | None = None
    servers: list[str] = []
    node: str = ""
    job: str = ""
    shared_host: bool = False
    token_file: str = ""
    join_token_file: str = ""
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    interval_s: float = 1.0
    spool_dir: str = ""
    spool_bytes_max: int = BYTES_MAX
    spool_keep_s: float = KEEP_S
    hook_socket: str = ""
    backoff_s_max: float = 5.0
    connect_s: float = 2.0
    answer_s: float = 5.0
    metrics_listen: str = "127.0.0.1:8471"
    dcgm_exporter: str = ""
    nccl_inspector_folders: list[str] = []
    flight_recorder_prefixes: list[str] = []
    flight_recorder_pipe_prefixes: list[str] = []
    nccl_ras_ports: list[int] = []
    nccl_ras_every_s: float = 10.0
    nccl_ras_every_node: bool = False
    training_logs: list[str] = []
    training_log_framework: str = ""
    training_log_patterns: list[str] = []
    tensorboard_logs: list[str] = []
    node_check_command: list[str] = []
    nvrx_health_socket: str = ""
    nvrx_health_gpus: int = -1


def read(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> AgentConfiguration:
    """Return the configuration with the node's name filled in. Raises ConfigurationError naming the key."""
    configuration = load(AgentConfiguration, file, environ, flags)
    configuration = msgspec.structs.replace(configuration, node=configuration.node or socket.gethostname())
    _check(configuration)
    return configuration


def server_urls(configuration: AgentConfiguration) -> list[str]:
    """Return the servers of which one gets the frames; the first is asked first."""
    return configuration.servers or [DEFAULT_SERVER if configuration.server is None else configuration.server]


def spool_folder(configuration: AgentConfiguration, environ: Mapping[str, str]) -> Path:
    """Return the folder where frames wait: as configured, else the system's if writable, else the user's."""
    if configuration.spool_dir:
        return Path(configuration.spool_dir)
    place = SYSTEM_SPOOL if SYSTEM_SPOOL.exists() else SYSTEM_SPOOL.parent
    if os.access(place, os.W_OK | os.X_OK):
        return SYSTEM_SPOOL
    state = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME", "/")) / ".local/state")
    return Path(state) / "eagle-eye/agent"


def token_path(configuration: AgentConfiguration, environ: Mapping[str, str]) -> Path | None:
    """Return the file of this node's token; None: no token is needed."""
    if configuration.token_file:
        return Path(configuration.token_file)
    return spool_folder(configuration, environ) / "token" if configuration.join_token_file else None


def exposed_secrets(configuration: AgentConfiguration, environ: Mapping[str, str]) -> list[str]:
    """Return one line for each file of a secret that every user of this machine can read."""
    key = configuration.key_file or configuration.certificate_file  # whose file then has the key, too
    files = {
        "token_file": token_path(configuration, environ),
        "join_token_file": Path(configuration.join_token_file) if configuration.join_token_file else None,
        "key_file" if configuration.key_file else "certificate_file": Path(key) if key else None,
    }
    return [line for key, file in files.items() if file and (line := open_to_others(key, file))]


def trust(configuration: AgentConfiguration) -> Trust:
    """Return the certificates for connections to the server."""
    names = (configuration.ca_file, configuration.certificate_file, configuration.key_file)
    return Trust(*(Path(name) if name else None for name in names))


def hook_socket_path(configuration: AgentConfiguration) -> Path:
    """Return the socket where hooks find this agent. An agent running as root creates the folder that hooks look in."""
    if configuration.hook_socket:
        return Path(configuration.hook_socket)
    if os.geteuid() == 0:
        return SYSTEM_FOLDER / "hook.sock"
    return default_socket()


def log_patterns(configuration: AgentConfiguration) -> list[Pattern]:
    """Return the training logs to follow. Raises BadPattern, which ``read`` turns into a ConfigurationError."""
    return [Pattern(text, configuration.node) for text in configuration.training_logs]


def log_frameworks(configuration: AgentConfiguration) -> tuple[Framework, ...]:
    """Return the frameworks to parse. Raises BadLinePattern, which ``read`` turns into a ConfigurationError."""
    return expected(configuration.training_log_framework, configuration.training_log_patterns)


def tensorboard_patterns(configuration: AgentConfiguration) -> list[Pattern]:
    """Return the event files to follow. Raises BadPattern, which ``read`` turns into a ConfigurationError."""
    return [file for folder in configuration.tensorboard_logs for file in event_files(folder, configuration.node)]


def _check(configuration: AgentConfiguration) -> None:
    _check_servers(configuration)
    _check_names(configuration)
    _check_numbers(configuration)
    _check_node_check_command(configuration)
    _check_files(configuration)
    for key, check in (("metrics_listen", metrics_server.address), ("dcgm_exporter", dcgm_exporter.address)):
        _refuse(key, check, getattr(configuration, key))
    for key, patterns in (
        ("training_logs", log_patterns),
        ("tensorboard_logs", tensorboard_patterns),
        ("training_log_patterns", log_frameworks),
    ):
        _refuse(key, patterns, configuration)


def _refuse(key: str, check: Callable[[Any], object], value: Any) -> None:
    """Raise ConfigurationError for a value that ``check`` rejects; empty values are not checked."""
    try:
        if value:
            check(value)
    except ValueError as error:
        raise ConfigurationError(f"{key}: {error}") from None


def _check_names(configuration: AgentConfiguration) -> None:
    for key in ("node", "job"):
        text = getattr(configuration, key)
        if len(text) > NAME_CHARS_MAX or not text.isprintable() or not (text or key == "job"):
            raise ConfigurationError(f"{key}: expected 1 to {NAME_CHARS_MAX} printable characters, got {text[:80]!r}")
    framework = configuration.training_log_framework
    known = ("", *(parser.name for parser in FRAMEWORKS))
    if framework not in known:
        raise ConfigurationError(
            f"training_log_framework: expected one of {', '.join(map(repr, known))}, got {framework[:80]!r}"
        )


def _check_node_check_command(configuration: AgentConfiguration) -> None:
    key, words = "node_check_command", configuration.node_check_command
    if len(words) > WORDS_MAX or any(not word or len(word) > WORD_CHARS_MAX or "\0" in word for word in words):
        raise ConfigurationError(
            f"{key}: expected at most {WORDS_MAX} words of 1 to {WORD_CHARS_MAX} characters, got {len(words)} words"
        )
    # argparse accepts it abbreviated, too.
    if any(word in ("--for", "--forc", "--force") for word in words):
        raise ConfigurationError(f"{key}: expected no --force: a check that the server asks for disturbs nobody")


def _check_numbers(configuration: AgentConfiguration) -> None:
    for key, least, most in (
        ("interval_s", INTERVAL_S_MIN, INTERVAL_S_MAX),
        ("backoff_s_max", TIMEOUT_S_MIN, INTERVAL_S_MAX),
        ("connect_s", TIMEOUT_S_MIN, INTERVAL_S_MAX),
        ("answer_s", TIMEOUT_S_MIN, INTERVAL_S_MAX),
        ("spool_bytes_max", SPOOL_BYTES_MIN, SPOOL_BYTES_MAX),
        ("spool_keep_s", 0.0, SPOOL_KEEP_S_MAX),
        ("nccl_ras_every_s", nccl_ras.EVERY_S, INTERVAL_S_MAX),
        ("nvrx_health_gpus", -1, GPUS_MAX),
    ):
        value = getattr(configuration, key)
        if not least <= value <= most:
            raise ConfigurationError(f"{key}: expected {least} to {most}, got {value}")
    for key in _PLACES:
        if len(getattr(configuration, key)) > PLACES_MAX:
            raise ConfigurationError(f"{key}: expected at most {PLACES_MAX}, got {len(getattr(configuration, key))}")
    ports = configuration.nccl_ras_ports
    if len(ports) > PORTS_MAX or not all(0 < port < 1 << 16 for port in ports):
        raise ConfigurationError(f"nccl_ras_ports: expected at most {PORTS_MAX} ports from 1 to 65535, got {ports}")


def _check_files(configuration: AgentConfiguration) -> None:
    # The token file need not exist until the join token has been exchanged for it, and the join token may be gone
    # afterwards.
    keys = ("ca_file", "certificate_file", "key_file")
    for key in keys if configuration.join_token_file else ("token_file", *keys):
        name = getattr(configuration, key)
        if name and not os.access(name, os.R_OK):
            raise ConfigurationError(f"{key}: {name} cannot be read")
    if configuration.key_file and not configuration.certificate_file:
        raise ConfigurationError("certificate_file: expected a file, since key_file is set; got none")
    for key, path in (
        ("hook_socket", hook_socket_path(configuration)),
        ("nvrx_health_socket", Path(configuration.nvrx_health_socket)),
    ):
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigurationError(f"{key}: expected a path of at most {SOCKET_PATH_BYTES_MAX} bytes, got {path}")
    if configuration.nvrx_health_socket:
        if not configuration.nvrx_health_socket.startswith("/"):
            raise ConfigurationError(
                f"nvrx_health_socket: expected an absolute path, got {configuration.nvrx_health_socket!r}"
            )
        if importlib.util.find_spec("h2") is None:
            raise ConfigurationError("nvrx_health_socket: needs the package h2; pip install 'eagle-eye[nvrx]'")


def _check_servers(configuration: AgentConfiguration) -> None:
    urls = server_urls(configuration)
    if configuration.servers and configuration.server is not None:
        raise ConfigurationError(
            "server: expected either server (which --server and EAGLE_EYE_SERVER set, too) or servers, got both;"
            " leave one out"
        )
    if len(urls) > SERVERS_MAX:
        raise ConfigurationError(f"servers: expected at most {SERVERS_MAX}, got {len(urls)}")
    for number, url in enumerate(urls):
        _check_server(f"servers[{number}]" if configuration.servers else "server", url)
        if any(place(url) == place(earlier) for earlier in urls[:number]):
            raise ConfigurationError(f"servers[{number}]: expected each server once, got {url!r} again")


def _check_server(key: str, server: str) -> None:
    expected = f"{key}: expected http://host:port or https://host:port, got {server!r}"
    try:
        parts = urlsplit(server)
        port = parts.port
    except ValueError:
        raise ConfigurationError(expected) from None
    if parts.username or parts.password:
        raise ConfigurationError(f"{key}: a URL with a password; put the token into a file and name it in token_file")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigurationError(expected)
