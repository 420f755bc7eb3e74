"""Parses PyTorch's NCCL watchdog lines in a training log, one at a time. Pure.

The lines are those of ProcessGroupNCCL.cpp, from PyTorch 1.13 to 2.13: a collective that timed out, and how far the
process group had come when the watchdog looked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LINE_CHARS_MAX = 4_096  # these lines are below 1,000 characters; the rest of a longer one is something else
NAME_CHARS_MAX = 128  # per operation or group; PyTorch's own are below 50

_TIMEOUT = "Watchdog caught collective operation timeout"
_NUMBER = r"(-?[0-9]{1,18})(?![0-9])"  # a 64-bit counter never has more digits
_JOB_RANK = re.compile(r"\[rank([0-9]{1,9})\]")  # from PyTorch's logger, on every line since 2.2
# Each version adds fields: Rank 1; PG 0 (default_pg) Rank 1; PG ID 5 PG GUID 37(TENSOR_...) Rank 1.
_GROUP_RANK = re.compile(
    r"\[(?:PG (?:ID [0-9]{1,9} PG GUID )?([^\s()\[\]]{1,100}) ?(?:\(([^()\[\]]{0,200})\) )?)?Rank ([0-9]{1,9})\]"
)
_DEFAULT_GROUP = "default_pg"  # of all ranks: its group ranks equal the job's ranks
_WORK = re.compile(rf"WorkNCCL\((?:SeqNum|Seq)={_NUMBER}, ?OpType=([A-Za-z0-9_]{{1,{NAME_CHARS_MAX}}})")
_TIMEOUT_MS = re.compile(r"Timeout\(ms\)=([0-9]{1,15})(?![0-9])")
_AT_WORK = re.compile(rf"\bat (?:NCCL )?work(?: sequence id)?: ?{_NUMBER}")
_ENQUEUED = re.compile(rf"\b[Ll]ast enqueued (?:NCCL )?work: ?{_NUMBER}")
_COMPLETED = re.compile(rf"\blast completed (?:NCCL work|work)?:? ?{_NUMBER}")


@dataclass(frozen=True)
class WatchdogLine:
    """One watchdog line; None for fields it does not contain.

    ``rank`` is the rank in the job, ``group_rank`` the one in the process group: for a group of some ranks they differ,
    and PyTorch before 2.2 writes only the second. ``group`` is the group's name and description as the flight recorder
    has them ("37 TENSOR_MODEL_PARALLEL_GROUP"), "" where the line names none. ``timed_out`` is True on the line that
    names the collective: its ``sequence`` in the group, its ``operation`` ("ALLREDUCE"), and how long it was allowed,
    in seconds. ``enqueued`` and ``completed`` are the group's highest sequences when the watchdog looked, -1: none yet.
    They are the host's counts: a rank whose collective is not enqueued may also hang inside the enqueue call.
    """

    rank: int | None = None
    group_rank: int | None = None
    group: str = ""
    timed_out: bool = False
    sequence: int | None = None
    operation: str = ""
    timeout_s: float | None = None
    enqueued: int | None = None
    completed: int | None = None


def parse_watchdog(line: str) -> WatchdogLine | None:
    """Parse a watchdog line; None for every other line. Never raises."""
    if _TIMEOUT not in line and "ast enqueued " not in line:  # rejects nearly all of a million lines
        return None
    line = line[:LINE_CHARS_MAX]
    work = _WORK.search(line)
    timed_out = _TIMEOUT in line and work is not None
    enqueued = _integer(_ENQUEUED, line)
    if not timed_out and enqueued is None:
        return None
    member = _GROUP_RANK.search(line)
    name, description, spelt = member.groups(default="") if member is not None else ("", "", "")
    group_rank = int(spelt) if spelt else None
    completed = _integer(_COMPLETED, line)
    if completed is not None and enqueued is not None and completed > enqueued:
        completed = None  # PyTorch 2.3 printed uninitialized memory
    timeout_ms = _integer(_TIMEOUT_MS, line)
    return WatchdogLine(
        rank=named_rank(line),
        group_rank=group_rank,
        group=_printable(f"{name} {description}".strip()),
        timed_out=timed_out,
        sequence=int(work[1]) if work is not None else _integer(_AT_WORK, line),
        operation=work[2] if work is not None else "",
        timeout_s=timeout_ms / 1e3 if timeout_ms is not None else None,
        enqueued=enqueued,
        completed=completed,
    )


def named_rank(line: str) -> int | None:
    """Return the rank in the job that a line of PyTorch names, None if it names none."""
    rank = _integer(_JOB_RANK, line)
    member = _GROUP_RANK.search(line) if rank is None else None
    return int(member[3]) if member is not None and member[2] == _DEFAULT_GROUP else rank


def _integer(pattern: re.Pattern[str], line: str) -> int | None:
    found = pattern.search(line)
    return int(found[1]) if found is not None else None


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text[:NAME_CHARS_MAX])
