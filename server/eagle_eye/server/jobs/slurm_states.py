"""Slurm's words for the states of jobs and nodes, and what they mean to us. Pure.

The words are those of ``squeue`` and ``sinfo`` from 20.11 on. Newer Slurm gives all of a job's words ("CANCELLED" and
"COMPLETING"), older only the last ("COMPLETING"), from which nobody can tell how it ended.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from eagle_eye.server.jobs.source import ScheduledState
from eagle_eye.server.model.records import NodeState

# The first row with a word that the job has counts. A requeued job says how its last run ended as well, but waits.
_JOB_STATES: tuple[tuple[ScheduledState, frozenset[str]], ...] = (
    ("pending", frozenset({"REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"})),
    ("cancelled", frozenset({"CANCELLED", "REVOKED"})),
    ("preempted", frozenset({"PREEMPTED"})),
    ("timeout", frozenset({"TIMEOUT", "DEADLINE"})),
    (
        "failed",
        frozenset({"FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL"}),
    ),
    ("finished", frozenset({"COMPLETED"})),
    ("pending", frozenset({"PENDING", "CONFIGURING", "POWER_UP_NODE"})),
    ("completing", frozenset({"COMPLETING", "STAGE_OUT"})),
    ("suspended", frozenset({"SUSPENDED", "STOPPED"})),
    ("running", frozenset({"RUNNING", "RESIZING", "SIGNALING", "UPDATE_DB", "EXPEDITING"})),
)
_DRAINS = frozenset({"drain", "draining", "drained", "fail", "failing"})
_DOWN = frozenset({"down", "error"})
_BUSY = frozenset({"allocated", "mixed", "completing", "draining", "failing", "blocked"})
_MAINTENANCE = frozenset({"maint", "maintenance"})
_SYMBOLS = "*~#!%$@^-"  # what sinfo hangs on a state: not responding, powered down, ...


class NodeWord(NamedTuple):
    """A node's standing, whether somebody drained it, and whether it is reserved for maintenance."""

    state: NodeState
    drained: bool
    maintenance: bool


def job_state(words: Collection[str], *, preempted: bool = False) -> ScheduledState:
    """Return our word for a job's; "" for none that is known here.

    ``preempted``: Slurm has asked it to leave and it still runs, for the grace time of its partition.
    """
    said = {word.upper() for word in words}
    state: ScheduledState = next((state for state, known in _JOB_STATES if said & known), "")
    return "preempted" if preempted and state in ("running", "completing") else state


def node_state(words: Collection[str]) -> NodeWord:
    """Return what a node's words mean.

    A node that does not respond is in service until Slurm calls it down: silence is no standing.
    """
    said = {word.lower().rstrip(_SYMBOLS) for word in words}
    drained = bool(said & _DRAINS)
    state: NodeState = "excluded" if drained or said & _DOWN else "in_service"
    if drained and said & _BUSY:
        state = "draining"
    return NodeWord(state, drained, bool(said & _MAINTENANCE))
