"""Watches processes and reports each exit immediately. Touches: pidfds, and one thread that sleeps until an exit."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

# Finds out how a process that is not our child ended.
#
# Touches: pidfds and /proc. A zombie shows its exit code in /proc until its parent reaps it; where the parent was
# faster, Linux 6.15 and later still report it through the pidfd.
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


REPORTED_SINCE = (6, 15)  # Linux versions that keep the exit code for holders of a pidfd (PIDFD_GET_INFO)

Ended = Callable[[int, "int | None"], None]  # a pid and its exit code


class ExitReporter(Protocol):
    """Anything that reports exits of processes; see ``Ends`` for the methods."""

    def watch(self, pid: int) -> None:
        """Watch the process. Raises ProcessLookupError when it is gone."""
        ...

    def forget(self, pid: int) -> None:
        """Stop watching the process."""
        ...

    def poll(self) -> None:
        """Check the processes that no descriptor covers."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


def exits_are_reported(release: str) -> bool:
    """Whether this kernel reports every exit code to holders of a pidfd; older ones guarantee it only to the parent."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return found is not None and (int(found[1]), int(found[2])) >= REPORTED_SINCE


class Ends:
    """Watches processes; calls ``ended(pid, exit_code)`` once per exit, from a thread of this class.

    The exit code is negative for a signal, and None where this host does not report every one: a code read by chance,
    before the parent reaped it, would make the one process with a known code look like the first that died.
    """

    def __init__(self, ended: Ended, release: str = os.uname().release) -> None:
        self._ended = ended
        self._reported = exits_are_reported(release)
        self._pidfds: dict[int, int] = {}  # by pid
        self._polled: set[int] = set()  # processes without a pidfd
        self._lock = threading.Lock()
        self._epoll: select.epoll | None = None
        self._stop = -1
        self._thread: threading.Thread | None = None

    def watch(self, pid: int) -> None:
        """Watch the process. Raises ProcessLookupError when it is gone."""
        pidfd = open_pidfd(pid)
        with self._lock:
            if pidfd is None:
                self._polled.add(pid)
                return
            epoll = self._started()
            self._pidfds[pid] = pidfd
            epoll.register(pidfd, select.EPOLLIN)

    def forget(self, pid: int) -> None:
        """Stop watching the process; its exit is not reported."""
        with self._lock:
            self._polled.discard(pid)
            pidfd = self._pidfds.pop(pid, None)
            if pidfd is not None:
                self._close(pidfd)

    def poll(self) -> None:
        """Check the processes that no descriptor covers."""
        for pid in [pid for pid in self._polled if not is_running(pid)]:
            self._polled.discard(pid)
            self._ended(pid, None)

    def close(self) -> None:
        """Stop, and release every descriptor."""
        thread = self._thread
        if thread is not None:
            os.eventfd_write(self._stop, 1)
            thread.join()
        for pid in [*self._pidfds, *self._polled]:
            self.forget(pid)
        if self._epoll is not None:
            self._epoll.close()
            os.close(self._stop)
            self._epoll = self._thread = None

    def _started(self) -> select.epoll:
        if self._epoll is None:
            self._epoll = select.epoll()
            self._stop = os.eventfd(0, os.EFD_CLOEXEC)
            self._epoll.register(self._stop, select.EPOLLIN)
            self._thread = threading.Thread(target=self._run, args=(self._epoll,), name="process-ends", daemon=True)
            self._thread.start()
        return self._epoll

    def _run(self, epoll: select.epoll) -> None:
        while True:
            ready = {descriptor for descriptor, _ in epoll.poll()}
            if self._stop in ready:
                return
            with self._lock:
                # Checked again: the descriptor may have been closed since, and its number reused for another process.
                ended = [(pid, pidfd) for pid, pidfd in self._pidfds.items() if pidfd in ready and _is_ready(pidfd)]
                codes = {pid: exit_code(pid, pidfd) if self._reported else None for pid, pidfd in ended}
                for pid, pidfd in ended:
                    del self._pidfds[pid]
                    self._close(pidfd)
            for pid, code in codes.items():
                self._ended(pid, code)

    def _close(self, pidfd: int) -> None:
        if self._epoll is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(pidfd)
        os.close(pidfd)


def _is_ready(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
