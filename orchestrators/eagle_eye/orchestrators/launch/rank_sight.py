"""Observes a node's ranks during start: which processes are stopped, which have reached the store.

Reads /proc, and connects to the store.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable

import psutil

from eagle_eye.orchestrators.launch.messages import RankSight, StartedRank

CONNECTED_WITHIN_S = 1.0  # a single lost segment is resent by then
PROCESSES_MAX = 64  # examined per rank: its data loaders are irrelevant here


def look_at_ranks(ranks: Iterable[StartedRank], store_port: int) -> list[RankSight]:
    """Return each rank's state. A rank has arrived once one of its processes has a connection to the store.

    That connection is made at ``init_process_group`` and kept; a rank that uses another rendezvous never arrives.
    Unreadable facts are None and not held against it. A process traced by a debugger does not count as stopped.
    """
    return [_look(rank, store_port) for rank in ranks]


def reaches(host: str, port: int) -> bool:
    """Return whether a connection to the store can be made from here, within CONNECTED_WITHIN_S."""
    try:
        with socket.create_connection((host, port), CONNECTED_WITHIN_S):
            return True
    except OSError:
        return False


def _look(rank: StartedRank, store_port: int) -> RankSight:
    stopped, joined, read = False, False, False
    for process in _family(rank.pid):
        with contextlib.suppress(psutil.Error, OSError):
            stopped = stopped or process.status() == psutil.STATUS_STOPPED
            joined = joined or _has_come(process, store_port)
            read = True
    return RankSight(rank.rank, stopped, joined if read else None)


def _family(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)][:PROCESSES_MAX]
    except psutil.Error:
        return []


def _has_come(process: psutil.Process, store_port: int) -> bool:
    # Its name before psutil 6.
    connections = getattr(process, "net_connections", None) or process.connections
    return any(
        one.raddr and one.raddr[1] == store_port and one.status == psutil.CONN_ESTABLISHED for one in connections("tcp")
    )
