"""Ends a replica group's wait for one whose node has just been excluded: in the training program, beside its loop.

    release = Release("/shared/excluded")         # the orchestrator's exclude file
    ...
    with release.waiting():                       # each step: what reduces
        manager.allreduce(gradients).wait()
    if manager.errored() is not None:
        pg.abort()                                # the process group that the Manager has

A group that is killed closes its connections, and its neighbours notice at once. One that cannot be reached closes
none, and without this its neighbours wait until the collective's timeout: this process shuts its own connections to the
node down. Needs the standard library alone. Touches: the exclude file, /proc/self/fd, one daemon thread.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

LOOK_S = 0.1
# Reductions that go on take less; one that waits for longer while a node is excluded waits for that node.
WAITED_S = 1.0
FILE_BYTES_MAX = 1 << 20

_log = logging.getLogger("eagle_eye.release")


def addresses_of(node: str) -> Collection[str]:
    """Return the addresses that the node's name stands for. Raises OSError for an unknown name."""
    return {str(found[4][0]) for found in socket.getaddrinfo(node, None, type=socket.SOCK_STREAM)}


class Release:
    """Ends a wait once a node is excluded during it; never raises into the training loop."""

    def __init__(
        self,
        exclude_file: str | os.PathLike[str],
        addresses: Callable[[str], Collection[str]] = addresses_of,
        waited_s: float = WAITED_S,
    ) -> None:
        """``addresses`` returns a node's addresses, those by which the groups reach each other among them."""
        self.released = 0  # how often a wait was ended
        self.failures = 0  # how often the file or a node's address could not be read; the first is logged
        self._file, self._addresses, self._waited_s = Path(exclude_file), addresses, waited_s
        self._began_s: float | None = None  # of the current wait, monotonic
        self._looked_at: float | None = None  # the wait of the last look
        self._version: tuple[int, int] | None = None  # of the file that was read last
        self._excluded: frozenset[str] = frozenset()
        self._known = self._read()  # the nodes that were excluded before the wait
        threading.Thread(target=self._watch, name="eagle-eye-release", daemon=True).start()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the part of a step in which other replica groups may be waited for."""
        self._began_s = time.monotonic()
        try:
            yield
        finally:
            self._began_s = None

    def end_if_due(self, now_s: float) -> None:
        """End the wait if it has lasted and a node was excluded meanwhile."""
        began_s = self._began_s
        if began_s is None or began_s != self._looked_at:
            self._known = self._excluded  # as of the last look
        self._looked_at = began_s
        new = self._read() - self._known
        if not new or began_s is None or now_s - began_s < self._waited_s:
            return
        self._known = self._excluded
        self.released += 1
        peers: set[str] = set()
        for node in sorted(new):
            try:
                peers.update(self._addresses(node))
            except OSError as error:
                self._fail(error)
        closed = shut_down_connections(peers)
        _log.warning(
            "the wait for excluded %s ends after %.1f s: %d connections shut down",
            ", ".join(sorted(new)), now_s - began_s, closed,
        )  # fmt: skip

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self.end_if_due(time.monotonic())

    def _read(self) -> frozenset[str]:
        """Return the excluded nodes, as last read where the file cannot be read now."""
        try:
            status = self._file.stat()
            version = status.st_ino, status.st_mtime_ns
            if version != self._version:
                with self._file.open("rb") as file:
                    self._excluded = frozenset(file.read(FILE_BYTES_MAX).decode("utf-8", "replace").split())
                self._version = version
        except FileNotFoundError:
            self._excluded, self._version = frozenset(), None
        except OSError as error:
            self._fail(error)
        return self._excluded

    def _fail(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            _log.warning("the release failed and goes on (further failures are only counted): %r", error)


def shut_down_connections(peers: Collection[str]) -> int:
    """Shut this process's TCP connections to these addresses down; return how many there were."""
    closed = 0
    for name in os.listdir("/proc/self/fd") if peers else ():  # noqa: PTH208 - numbers alone
        with contextlib.suppress(OSError):  # no socket, not connected, or closed meanwhile
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115 - it names no path
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                inet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if inet and connection.type == socket.SOCK_STREAM and _plain(connection.getpeername()[0]) in peers:
                    connection.shutdown(socket.SHUT_RDWR)
                    closed += 1
    return closed


def _plain(address: str) -> str:
    """Return an IPv4 address that is written as IPv6 (::ffff:10.0.0.1) as IPv4."""
    mapped = getattr(ipaddress.ip_address(address.partition("%")[0]), "ipv4_mapped", None)
    return address if mapped is None else str(mapped)
