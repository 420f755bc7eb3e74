"""Strips what terminals and launchers add to a line: colours, ranks, tasks, pids. Pure; never raises.

Known: PyTorch's ``[rank3]: `` (the rank in the job), torchrun's ``[default0]:`` (role and local rank; torchtitan calls
its role "rank", but only PyTorch adds a space or a log level after it), the task of ``srun --label`` (``3: ``), Ray's
``(Trainer pid=12, ip=10.0.0.2) ``, Open MPI's ``[1,3]<stdout>:``, the CRI's time and stream before each line of a
container's log, and ``kubectl logs --timestamps``'s time before an object.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PREFIXES_MAX = 4  # of different launchers, nested

_BEGINNINGS = frozenset("[( 0123456789")

_ANSI = re.compile(r"\x1b(?:\[[0-9;:?]{0,40}[ -/]?[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\))")
_CRI = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,20}(?:Z|[+-][0-9:]{5}) (?:(?:stdout|stderr) [FP] |(?=\{))")
_TASK = re.compile(r" {0,6}([0-9]{1,7}): ")
_RANK = re.compile(r"\[rank([0-9]{1,7})\]:(?: |(?=\[?[A-Z][0-9]{3,4} ))")
_ROLE = re.compile(r"\[[A-Za-z_]{1,40}([0-9]{1,5})\]:")
_MPI = re.compile(r"\[[0-9]{1,7},([0-9]{1,7})\]<std(?:out|err)>: ?")
_RAY = re.compile(r"\([A-Za-z_][^()]{0,200}?pid=([0-9]{1,10})(?:, ip=[0-9A-Fa-f.:]{2,45})?\) ?")


@dataclass(frozen=True)
class LogLine:
    """A line without its prefixes, and their values; None for those absent.

    ``rank`` is the rank in the job, ``local_rank`` the one among a launcher's ranks, ``task`` the scheduler's task.
    """

    text: str
    rank: int | None = None
    local_rank: int | None = None
    task: int | None = None
    pid: int | None = None


def without_prefixes(line: str) -> LogLine:
    """Return the line without colours and known prefixes."""
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    rank = local_rank = task = pid = None
    at = 0
    if line[:1] not in _BEGINNINGS:
        return LogLine(line)
    for place in range(PREFIXES_MAX):
        if found := _CRI.match(line, at):
            pass
        elif found := _RANK.match(line, at):
            rank = int(found[1])
        elif found := _ROLE.match(line, at):
            local_rank = int(found[1])
        elif found := _MPI.match(line, at):
            rank = int(found[1])
        elif found := _RAY.match(line, at):
            pid = int(found[1])
        elif place == 0 and (found := _TASK.match(line, at)):
            task = int(found[1])
        else:
            break
        at = found.end()
    return LogLine(line[at:], rank, local_rank, task, pid)
