"""What the ranks' processes do, by kernel accounting: reads that never stop a process. Touches: /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from eagle_eye.agent.processes.census import MemberProcess
from eagle_eye.agent.processes.process_files import ProcessFiles, Stat
from eagle_eye.agent.processes.process_registry import TrainingProcess

FAMILY_MAX = 128  # processes per rank: data loaders, compile workers; larger families are not reported
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
HELD = "D"  # uninterruptible sleep: in a driver, or waiting for storage


def rows(
    files: ProcessFiles, ranks: Iterable[TrainingProcess], members: Iterable[MemberProcess]
) -> dict[int, dict[str, float]]:
    """Return each rank's row by device: CPU time and bytes of its process and all descendants.

    Reaped children count in their parent's accounts. A counter is left out if any part of it cannot be read.
    """
    children: dict[int, list[int]] = {}
    for member in members:
        children.setdefault(member.parent, []).append(member.pid)
    found = {}
    for rank in ranks:
        if rank.starting:  # the GPU that it is expected on may be another's
            continue
        family = _family(rank.pid, children)
        stats = [_stat(files, pid) for pid in family[:FAMILY_MAX]]
        own = stats[0]
        if own is None or len(family) > FAMILY_MAX:
            continue
        row = {"rank_blocked_ratio": float(own.state == HELD)}
        row["rank_cpu_seconds_total"] = sum(stat.cpu_ticks for stat in stats if stat is not None) / TICKS_PER_S
        moved = [_moved(files, pid) for pid in family]
        known = [number for number in moved if number is not None]
        if len(known) == len(moved):
            row["rank_io_bytes_total"] = float(sum(known))
        found[rank.device] = row
    return found


def _family(pid: int, children: dict[int, list[int]]) -> Sequence[int]:
    """Return a process and its descendants, a little over FAMILY_MAX at most."""
    family = [pid]
    for member in family:
        if len(family) > FAMILY_MAX:
            break
        family += [child for child in children.get(member, ()) if child not in family]
    return family


def _stat(files: ProcessFiles, pid: int) -> Stat | None:
    try:
        return files.stat(pid)
    except OSError:
        return None


def _moved(files: ProcessFiles, pid: int) -> int | None:
    """Return the bytes a process has read and written; 0 for one that has exited, None if not readable."""
    try:
        return files.io_bytes(pid)
    except OSError:
        return None
