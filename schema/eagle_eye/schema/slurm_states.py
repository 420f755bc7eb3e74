"""What Slurm's states of jobs and nodes mean to us: the one table that the server and Slurm's orchestrator read. Pure.

A job has a base state and any number of flags, and so has a node (sinfo(1), scontrol(1), Slurm's "Job State Codes").
JSON and sinfo's StateComplete name them all; squeue's columns name one, a flag rather than the base state ("COMPLETING"
of a job that FAILED), from which nobody can tell how the job ended.

Slurm's releases add flags: one that is not known here changes nothing beside a known base state. Without a known base
state it cannot be told where a job or node is: "unknown" is neither running nor ended, and never usable.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

JobPhase = Literal[
    "pending",
    "configuring",
    "running",
    "suspended",
    "completing",
    "cancelled",
    "preempted",
    "timeout",
    "failed",
    "finished",
    "unknown",
]
NodeEffect = Literal["", "busy", "away", "drained", "down", "maintenance", "unknown"]

NAMES_MAX = 16  # of one job or node

# A job has one; ends stand first, should it ever have two.
JOB_BASE_STATES: Mapping[str, JobPhase] = {
    "CANCELLED": "cancelled",
    "PREEMPTED": "preempted",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "FAILED": "failed",
    "NODE_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
    "BOOT_FAIL": "failed",
    "COMPLETED": "finished",
    "PENDING": "pending",
    "SUSPENDED": "suspended",
    "RUNNING": "running",
}
# They count more than any base state: that of a requeued job may still say how its last run ended.
JOB_DECIDING_FLAGS: Mapping[str, JobPhase] = {
    "REQUEUED": "pending",
    "REQUEUE_HOLD": "pending",
    "REQUEUE_FED": "pending",
    "RESV_DEL_HOLD": "pending",
    "SPECIAL_EXIT": "pending",  # requeued and held, marked by its exit code
    "REVOKED": "cancelled",  # a federation runs it in another cluster
}
# They say more of a job whose base state is that it has its nodes. CONFIGURING and POWER_UP_NODE: it does not wait in
# the queue (which nodes it avoids can't be changed any more), but its nodes boot: no process of it is missed there.
JOB_FLAGS_OF_ALLOCATED: Mapping[str, JobPhase] = {
    "COMPLETING": "completing",  # "has finished or been cancelled", and what comes after goes on
    "STAGE_OUT": "completing",
    "CONFIGURING": "configuring",
    "POWER_UP_NODE": "configuring",
    "STOPPED": "suspended",  # by SIGSTOP; it keeps its CPUs
}
# Beside a base state they change nothing about where the job is. What they mean where columns name them alone:
JOB_OTHER_FLAGS: Mapping[str, JobPhase] = {
    "RESIZING": "running",
    "SIGNALING": "running",  # only what runs is sent signals
    "EXPEDITING": "pending",  # "immediately eligible for scheduling"
    "LAUNCH_FAILED": "unknown",  # this and the next say why it is requeued, not where it is
    "RECONFIG_FAIL": "unknown",
    "UPDATE_DB": "unknown",  # bookkeeping
}
# In which processes of the job may still run though its base state says that it has ended, or that it waits again.
ENDING_FLAGS = frozenset({"COMPLETING", "STAGE_OUT"})

# What a name says of a node, "": nothing against it. "busy": jobs have it. "away": nothing starts there now, and it
# comes back by itself. "down": out of service, though nobody drained it. "unknown": Slurm itself cannot tell.
NODE_BASE_STATES: Mapping[str, NodeEffect] = {
    "IDLE": "",
    "ALLOCATED": "busy",
    "MIXED": "busy",
    "DOWN": "down",
    "ERROR": "down",
    "FUTURE": "down",  # not set up, "expected to be available in the indefinite future": nothing can start there
    "UNKNOWN": "unknown",  # the controller has just started
    "INVALID": "unknown",  # a number that Slurm has no name for
}
NODE_FLAGS: Mapping[str, NodeEffect] = {
    "DRAIN": "drained",
    "FAIL": "drained",  # expected to fail soon, by an administrator's word
    "INVALID_REG": "down",  # it has less than configured (a GPU too few), until slurmd is restarted
    "COMPLETING": "busy",
    "PERFCTRS": "busy",  # "not usable for any other jobs"
    # Slurm sets it at RESUME, until the node has registered again (scontrol update), and calls one DOWN that stays
    # silent: a node that was put back is free from then on, or no job that waits for it would ever be released.
    "NOT_RESPONDING": "",
    "BLOCKED": "away",  # by another job's exclusive topology
    # Slurm powers idle nodes down by itself, and up when a job needs them: it allocates "powered up nodes first,
    # powering up nodes second and lastly powered down nodes" (Power Saving Guide), and none while they power down.
    "POWERED_DOWN": "",
    "POWERING_UP": "",
    "POWER_UP": "",
    "POWER_DOWN": "away",
    "POWER_DRAIN": "away",
    "POWERING_DOWN": "away",
    # A reboot that is asked for prevents no job before it happens (scontrol reboot; with ASAP there is DRAIN as well).
    # Once issued, the node is away until it has booted; Slurm calls it DOWN where that takes too long.
    "REBOOT_REQUESTED": "",
    "REBOOT_ISSUED": "away",
    "REBOOT_CANCELED": "",
    "CANCEL_REBOOT": "",
    "MAINTENANCE": "maintenance",
    # Whose reservation it is, and for which job it is planned, Slurm knows: ours may be the one.
    "RESERVED": "",
    "PLANNED": "",
    "CLOUD": "",
    "DYNAMIC": "",
    "DYNAMIC_FUTURE": "",
    "DYNAMIC_NORM": "",
    "EXTERNAL": "",
    "RESUME": "",
    "UNDRAIN": "",
}
# sinfo's other names: one for a base state and a flag together, what --states takes, and the short forms.
NODE_ALIASES: Mapping[str, tuple[str, ...]] = {
    "DRAINED": ("DRAIN",),
    "DRAINING": ("DRAIN", "ALLOCATED"),
    "FAILING": ("FAIL", "ALLOCATED"),
    "INVAL": ("INVALID_REG",),
    "MAINT": ("MAINTENANCE",),
    "REBOOT": ("REBOOT_REQUESTED",),
    "NO_RESPOND": ("NOT_RESPONDING",),
    "ALLOC": ("ALLOCATED",),
    "BLOCK": ("BLOCKED",),
    "BOOT": ("REBOOT_REQUESTED",),
    "COMP": ("COMPLETING",),
    "DRNG": ("DRAIN", "ALLOCATED"),
    "FAILG": ("FAIL", "ALLOCATED"),
    "FUTR": ("FUTURE",),
    "MIX": ("MIXED",),
    "NPC": ("PERFCTRS",),
    "PLND": ("PLANNED",),
    "POW_DN": ("POWER_DOWN",),
    "POW_UP": ("POWER_UP",),
    "RESM": ("RESUME",),
    "RESV": ("RESERVED",),
    "UNK": ("UNKNOWN",),
}
# What sinfo hangs on a state in place of a flag.
NODE_SYMBOLS: Mapping[str, str] = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}

_JOB_NAMES = frozenset({*JOB_BASE_STATES, *JOB_DECIDING_FLAGS, *JOB_FLAGS_OF_ALLOCATED, *JOB_OTHER_FLAGS})
_NODE_NAMES = frozenset({*NODE_BASE_STATES, *NODE_FLAGS})
_NAME = re.compile(r"([A-Za-z_]{1,32})([*~#!%$@^-]*)")


class JobReading(NamedTuple):
    """Where a job is, and whether processes of it may still be ending."""

    phase: JobPhase
    completing: bool


class NodeReading(NamedTuple):
    """What a node's names say.

    ``drained``: somebody took it out, done or not. ``down``: it is out of service by itself. ``busy``: jobs have it.
    ``away``: nothing starts there now, and it comes back by itself. ``maintenance``: it is reserved for that.
    ``known``: it can be told where the node is.
    """

    drained: bool
    down: bool
    busy: bool
    away: bool
    maintenance: bool
    known: bool

    @property
    def usable(self) -> bool:
        """Whether Slurm starts jobs there, now or once it is free and back."""
        return self.known and not self.drained and not self.down

    @property
    def free(self) -> bool:
        """Whether nothing runs there, and a job could start now."""
        return self.usable and not self.busy and not self.away


def state_names(said: object) -> tuple[str, ...]:
    """Return the names in a state as Slurm writes it: "mixed+drain", "IDLE*", ["RUNNING", "COMPLETING"]; in capitals.

    A symbol behind a node's state becomes its flag. What is no name is left out, and what is beyond NAMES_MAX.
    """
    parts = said if isinstance(said, list) else re.split(r"[+ ,]", said) if isinstance(said, str) else []
    names: list[str] = []
    for part in parts[:NAMES_MAX]:
        if isinstance(part, str) and (found := _NAME.match(part)):
            names += [found[1].upper(), *(NODE_SYMBOLS[symbol] for symbol in found[2][: len(NODE_SYMBOLS)])]
    return tuple(names)


def read_job(names: Collection[str], *, preempted: bool = False) -> JobReading:
    """Return where a job is by its names.

    ``preempted``: Slurm has asked it to leave, and it has its nodes for the grace time of its partition.
    """
    said = {name.upper() for name in names}
    phase = _job_phase(said)
    if preempted and phase in ("configuring", "running", "completing"):
        phase = "preempted"
    return JobReading(phase, not said.isdisjoint(ENDING_FLAGS))


def _job_phase(said: set[str]) -> JobPhase:
    base = _first(JOB_BASE_STATES, said)
    decided = _first(JOB_DECIDING_FLAGS, said)
    if decided is not None:
        return decided
    more = _first(JOB_FLAGS_OF_ALLOCATED, said) if base in (None, "running", "suspended") else None
    if more is not None:
        return more
    if base is not None:
        return base
    alone = _first(JOB_OTHER_FLAGS, said) if said <= _JOB_NAMES else None
    return alone or "unknown"


def _first(table: Mapping[str, JobPhase], said: set[str]) -> JobPhase | None:
    return next((phase for name, phase in table.items() if name in said), None)


def read_node(names: Collection[str]) -> NodeReading:
    """Return what a node's names say."""
    capitals = [name.upper() for name in names]
    said = {name for given in capitals for name in NODE_ALIASES.get(given, (given,))}
    base = {NODE_BASE_STATES[name] for name in said if name in NODE_BASE_STATES}
    effects = base | {NODE_FLAGS[name] for name in said if name in NODE_FLAGS}
    return NodeReading(
        drained="drained" in effects,
        down="down" in effects,
        busy="busy" in effects,
        away="away" in effects,
        maintenance="maintenance" in effects,
        known="unknown" not in base if base else bool(said) and said <= _NODE_NAMES,
    )
