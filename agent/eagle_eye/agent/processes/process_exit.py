"""Finds out how a process that is not our child ended.

Touches: pidfds and /proc. A zombie shows its exit code in /proc until its parent reaps it; where the parent was faster,
Linux 6.15 and later still report it through the pidfd.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from pathlib import Path

_CAP_SYS_PTRACE = 19
_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, struct pidfd_info) with its first 64 bytes
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO = struct.Struct("<QQ11Ii")  # mask, cgroup, eleven ids, exit code


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process exits; None where the system provides none.

    Raises ProcessLookupError for a process that is gone.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:  # out of descriptors, or a sandbox that forbids it
        return None


def exit_code(pid: int, pidfd: int | None) -> int | None:
    """Return the exited process's status, negative for a signal, None when it cannot be determined."""
    status = _zombie_status(pid)
    if status is None and pidfd is not None:
        status = _pidfd_status(pidfd)
    return None if status is None else os.waitstatus_to_exitcode(status)


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    fields = _stat_fields(pid)
    return fields is not None and fields[0] not in ("Z", "X")


def _stat_fields(pid: int) -> list[str] | None:
    """Return /proc/pid/stat from its third field on; the second, the name, may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _zombie_status(pid: int) -> int | None:
    fields = _stat_fields(pid)
    if fields is None or fields[0] not in ("Z", "X") or len(fields) < 50 or not _may_read(pid):
        return None
    return int(fields[49])


def _may_read(pid: int) -> bool:
    """Whether the kernel shows us the exit code; to others it shows 0, which would look like success."""
    try:
        if Path(f"/proc/{pid}").stat().st_uid == os.geteuid():
            return True
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return False
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_SYS_PTRACE & 1)


def _pidfd_status(pidfd: int) -> int | None:
    info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    with contextlib.suppress(OSError):  # an older kernel
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
        mask, *_, status = _PIDFD_INFO.unpack(info)
        if mask & _PIDFD_INFO_EXIT:
            return int(status)
    return None
