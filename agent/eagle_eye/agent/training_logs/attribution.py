"""Attributes a log line to the rank that wrote it, among this node's training processes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from eagle_eye.agent.processes.process_registry import TrainingProcess
from eagle_eye.agent.training_logs.line_prefixes import LogLine
from eagle_eye.agent.training_logs.reading import LineWriter


class Missing(Enum):
    """Why a line has no process here."""

    ELSEWHERE = "elsewhere"  # its rank runs on another node, whose agent reports it
    UNKNOWN = "unknown"  # unattributable


@dataclass(frozen=True)
class LogOrigin:
    """What is known about a log besides its lines.

    ``owners`` are the training processes of this node that write to it themselves. The rest comes from its path.
    """

    owners: tuple[TrainingProcess, ...] = ()
    rank: int | None = None
    local_rank: int | None = None
    job: str | None = None


def writer_of(
    line: LogLine,
    rank: int | None,
    writer: LineWriter,
    origin: LogOrigin,
    processes: Sequence[TrainingProcess],
    tasks: Mapping[int, int],
) -> TrainingProcess | Missing:
    """Return the process that wrote the line.

    In order of precedence: the rank or process that the line names (``rank``, or in its prefix), the rank in the log's
    path, the one process that writes to the log, the framework's own rule (``writer``). A task or local rank prefixed
    to the line narrows the choice. ``tasks`` are the scheduler's tasks by pid, as far as known.
    """
    here = [process for process in origin.owners or processes if origin.job in (None, process.job)]
    if not here:
        return Missing.ELSEWHERE  # no rank of this node can have written it
    of_this_node = bool(origin.owners) or all(process.world_size <= len(here) for process in here)
    if line.pid is not None:
        here, of_this_node = [process for process in here if process.pid == line.pid], True
    if line.task is not None and tasks:
        here, of_this_node = [process for process in here if tasks.get(process.pid) == line.task], True
    local_rank = origin.local_rank if line.local_rank is None else line.local_rank
    if local_rank is not None:
        here = [process for process in here if process.local_rank == local_rank]
    for said in (rank, line.rank, origin.rank):
        if said is not None:
            return _only([process for process in here if process.rank == said])
    if not here:
        return Missing.ELSEWHERE
    if of_this_node and len(here) == 1:
        return here[0]
    if writer is LineWriter.ANY:
        return Missing.UNKNOWN
    return _only(
        [process for process in here if process.rank == (0 if writer is LineWriter.FIRST else process.world_size - 1)]
    )


def _only(found: list[TrainingProcess]) -> TrainingProcess | Missing:
    """Return the process of the newest attempt; several jobs with the same rank are ambiguous."""
    if not found:
        return Missing.ELSEWHERE
    if len({process.job for process in found}) > 1:
        return Missing.UNKNOWN
    return max(found, key=lambda process: process.attempt)
