"""Why a socket cannot listen on an address, and which process has it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp
_PROCESSES_MAX = 100_000  # looked through


def why_not(error: OSError, host: str, port: int, *, proc: Path = PROC) -> str:
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
