"""Whether the agent or the server in this container is alive, for HEALTHCHECK and Kubernetes's exec probes.

    python3 -I -S health.py agent|server

Exit code 0: it is. 1: it is not, or nobody can tell; one line says which. Neither asks whether the other end is there:
a restart would mend nothing. It runs every 30 s beside training, so it imports no more than it needs.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomllib

AGENT_CONFIGURATION = Path("/etc/eagle-eye/agent.toml")
SERVER_CONFIGURATION = Path("/etc/eagle-eye/server.toml")
METRICS_LISTEN = "127.0.0.1:8471"  # the agent's default
INTERVAL_S = 1.0  # likewise
FRAME_AGE_S_MAX = 60.0  # a frame's age at which systemd's watchdog ends the agent, too
FRAME_AGE_INTERVALS_MAX = 3.0
ANSWER_S = 4.0  # below the health check's own 5 s, so that the reason is still told
ANSWER_BYTES_MAX = 8 << 20  # of the agent's page: 1,024 GPUs and as many ranks
LAST_FRAME = re.compile(rb"^eagle_eye_agent_last_frame_timestamp_seconds(?:\{[^\n]*\})? (\S+)$", re.MULTILINE)


class NotWell(Exception):
    """It is not alive, or cannot be asked; the message says why."""


def agent(file: Path, environ: Mapping[str, str], now_s: float) -> str:
    """Return how fresh the agent's newest frame is, by its own page. Raises NotWell, OSError, ValueError."""
    keys = _keys(file)
    listen = _key("metrics_listen", keys, environ, METRICS_LISTEN)
    interval_s = float(_key("interval_s", keys, environ, INTERVAL_S))
    if not listen:
        raise NotWell("metrics_listen is empty: the agent's page is the only sign of life; set it or end health checks")
    said = LAST_FRAME.search(_get(listen, "/metrics"))
    if said is None:
        raise NotWell("the agent has made no frame yet")
    age_s = now_s - float(said[1])
    if age_s > max(FRAME_AGE_S_MAX, FRAME_AGE_INTERVALS_MAX * interval_s):
        raise NotWell(f"the agent's newest frame is {age_s:.0f} s old, at an interval of {interval_s:g} s")
    return f"the agent's newest frame is {age_s:.1f} s old"


def server(file: Path, environ: Mapping[str, str]) -> str:
    """Return that the server answers. Raises NotWell, OSError, ValueError, LookupError."""
    keys, listen = _keys(file), environ["EAGLE_EYE_LISTEN"]
    tls = bool(_key("tls.certificate_file", keys, environ, ""))
    demanding = _key("tls.client_certificates", keys, environ, "") == "all"
    if tls and demanding and _key("tls.client_ca_file", keys, environ, ""):
        # Its handshake ends before it refuses: this check has no certificate to show.
        _connected(listen, tls=True).close()
        return "the server answers the handshake"
    _get(listen, "/healthz", tls=tls)
    return "the server answers"


def _keys(file: Path) -> Mapping[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _key(dotted: str, keys: Mapping[str, Any], environ: Mapping[str, str], default: Any) -> Any:
    """Return a key's value by the rules of every configuration here: the environment wins over the file."""
    section, _, name = dotted.rpartition(".")
    table = keys.get(section, {}) if section else keys
    return environ.get(f"EAGLE_EYE_{dotted.replace('.', '_').upper()}", table.get(name, default))


def _get(listen: str, path: str, *, tls: bool = False) -> bytes:
    """Return the body of an answer 200. Raises NotWell, OSError, ValueError."""
    deadline_s = time.monotonic() + ANSWER_S
    answer = bytearray()
    with _connected(listen, tls=tls) as end:
        end.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode("ascii"))
        while len(answer) <= ANSWER_BYTES_MAX:
            end.settimeout(max(0.001, deadline_s - time.monotonic()))
            part = end.recv(1 << 16)
            if not part:
                break
            answer += part
        else:
            raise NotWell(f"{listen}{path} answered with more than {ANSWER_BYTES_MAX} bytes")
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0]
    if re.match(rb"HTTP/1\.1 200\b", status) is None:
        raise NotWell(f"{listen}{path} answered {status[:100]!r}")
    return body


def _connected(listen: str, *, tls: bool) -> socket.socket:
    """Return a connection, after its handshake where there is one. Raises OSError, ValueError."""
    host, _, port = listen.rpartition(":")
    # Linux takes 0.0.0.0 and :: for this machine.
    plain = socket.create_connection((host.strip("[]"), int(port)), ANSWER_S)
    if not tls:
        return plain
    import ssl

    context = ssl.create_default_context()
    context.check_hostname = False  # the way leads nowhere out of this container
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(plain)  # closes it when the handshake fails


def main(words: list[str]) -> int:
    """Ask, tell, and return the exit code."""
    if words not in (["agent"], ["server"]):
        print("expected agent or server", file=sys.stderr)
        return 1
    try:
        said = (
            agent(AGENT_CONFIGURATION, os.environ, time.time())
            if words == ["agent"]
            else server(SERVER_CONFIGURATION, os.environ)
        )
    except (NotWell, OSError, ValueError, LookupError) as error:
        print(f"not well: {type(error).__name__}: {error}" if not isinstance(error, NotWell) else f"not well: {error}")
        return 1
    print(said)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
