"""What long-running programs ask of their host: systemd's readiness and watchdog, and who listens on an address.

Touches: the notification socket, /proc.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

# Systemd's service protocol: sd_notify(3) and sd_watchdog_enabled(3). Not a library (sdnotify, systemd-python): the
# agent should not gain a dependency, and those block while systemd is busy.

ADDRESS_BYTES_MAX = 107  # the kernel's limit for a path; an abstract name's leading NUL counts


def notify_address(environ: Mapping[str, str]) -> bytes:
    """Return the socket's address, empty if there is no usable one: a path, or "@" and a name."""
    text = environ.get("NOTIFY_SOCKET", "")
    address = os.fsencode(text)
    if not text.startswith(("/", "@")) or len(address) > ADDRESS_BYTES_MAX:
        return b""
    return b"\0" + address[1:] if text.startswith("@") else address


def watchdog_s(environ: Mapping[str, str], pid: int) -> float:
    """Return the manager's deadline between two keep-alives; infinite if there is none for this process."""
    text, meant_for = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not (text.isascii() and text.isdecimal() and 0 < len(text) < 20) or meant_for not in ("", str(pid)):
        return math.inf
    return int(text) / 1e6 or math.inf


class NotifySocket:
    """Sends to systemd's notification socket, if there is one; never blocks and never fails.

    ``listens`` is whether there is one. A failure to reach it is logged to ``log`` once.
    """

    def __init__(self, environ: Mapping[str, str], log: logging.Logger) -> None:
        self._address = notify_address(environ)
        self._log = log
        self._warned = False

    @property
    def listens(self) -> bool:
        """Whether there is a socket to notify."""
        return bool(self._address)

    def send(self, *lines: str) -> bool:
        """Send KEY=value lines in one datagram; return False if they were not accepted and may be sent again."""
        if not self._address:
            return True
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as end:
                end.sendto("\n".join(lines).encode("utf-8", "replace"), self._address)
        except BlockingIOError:  # systemd is busy
            return False
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._log.warning("systemd cannot be notified: %s", error.strerror or error)
            return False
        return True


PROC = Path("/proc")
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp
_PROCESSES_MAX = 100_000  # looked through


def why_not_listening(error: OSError, host: str, port: int, *, proc: Path = PROC) -> str:
    """Return one line: the address, what the system says, and who listens there if that is the reason."""
    where = f"{f'[{host}]' if ':' in host else host}:{port}"
    reason = f"cannot listen on {where}: {error.strerror or error}"
    return f"{reason} ({_holder(port, proc)})" if error.errno == errno.EADDRINUSE else reason


def _holder(port: int, proc: Path) -> str:
    """Return which process listens on the port. Those of other users are visible to root alone."""
    sockets = set(_sockets(port, proc))
    for process in _processes(proc) if sockets else ():
        # A process may end meanwhile, and belong to somebody else.
        with contextlib.suppress(OSError):
            if any(str(file.readlink()) in sockets for file in (process / "fd").iterdir()):
                return f"process {process.name} has it: {_command(process)}"
    return f"a process that cannot be seen from here has it: sudo ss -ltnp 'sport = :{port}'"


def _sockets(port: int, proc: Path) -> Iterator[str]:
    """Yield the sockets that listen on the port, as the links of /proc/PID/fd name them (proc_pid_net, tcp)."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "self" / "net" / table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    yield f"socket:[{fields[9]}]"


def _processes(proc: Path) -> Iterator[Path]:
    with os.scandir(proc) as entries:
        for _, entry in zip(range(_PROCESSES_MAX), (one for one in entries if one.name.isdigit()), strict=False):
            yield Path(entry.path)


def _command(process: Path) -> str:
    words = (process / "cmdline").read_bytes()[:4_096].replace(b"\0", b" ").decode(errors="replace").strip()
    text = words or (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
    return "".join(char if char.isprintable() else "?" for char in text[:120])
