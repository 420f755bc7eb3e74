"""Slurm's notation: states of jobs and nodes as ours, host lists as names. Pure, with bounded cost for any input."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Literal, NamedTuple

HOSTS_MAX = 65_536  # of one list: Slurm's own limit
HOST_LIST_CHARS_MAX = 1 << 20
NAME_CHARS_MAX = 255
DIGITS_MAX = 18


class BadHostList(ValueError):
    """A text that is not a host list, or expands to more names than allowed."""


def expand_hosts(text: str, hosts_max: int = HOSTS_MAX) -> tuple[str, ...]:
    """Return the names in the order of the list; () for an empty one and Slurm's "(null)". Raises BadHostList."""
    if text in ("", "(null)", "None assigned"):
        return ()
    if len(text) > HOST_LIST_CHARS_MAX:
        raise BadHostList(f"a host list of {len(text)} characters; at most {HOST_LIST_CHARS_MAX}")
    found: list[str] = []
    for item in _items(text):
        parts = _parts(item)
        size = 1
        for choices in parts:
            size *= _size(choices)
        if len(found) + size > hosts_max:
            raise BadHostList(f"more than {hosts_max} hosts in {text[:80]!r}")
        found += map("".join, itertools.product(*([*_values(choices)] for choices in parts)))
    return tuple(found)


def _items(text: str) -> Iterator[str]:
    """Yield the items between commas outside of brackets."""
    begin, inside = 0, False
    for place, char in enumerate(text):
        if char in "[]":
            if (char == "[") == inside:
                raise BadHostList(f"brackets do not match in {text[:80]!r}")
            inside = not inside
        elif char == "," and not inside:
            yield text[begin:place]
            begin = place + 1
        elif not char.isprintable() or char.isspace():
            raise BadHostList(f"{char!r} in {text[:80]!r}")
    if inside:
        raise BadHostList(f"brackets do not match in {text[:80]!r}")
    yield text[begin:]


def _parts(item: str) -> list[list[tuple[str, int]]]:
    """Return an item as its parts, each a list of (first, count): "a[1-2]b" is [a x 1], [1 x 2], [b x 1]."""
    pieces = item.replace("]", "[").split("[")
    # Each of the item's names contains all text outside of the brackets.
    if not pieces[0] or sum(map(len, pieces[::2])) > NAME_CHARS_MAX:
        raise BadHostList(f"a name of no or of more than {NAME_CHARS_MAX} characters: {item[:80]!r}")
    parts: list[list[tuple[str, int]]] = []
    for place, piece in enumerate(pieces):
        if place % 2:
            parts.append([_range(one) for one in piece.split(",")])
        elif piece:
            parts.append([(piece, 1)])
    return parts


def _range(text: str) -> tuple[str, int]:
    """Return the first number as written, and the count: "08-11" is ("08", 4)."""
    first, dash, last = text.partition("-")
    last = last if dash else first
    for number in (first, last):
        if not (number.isascii() and number.isdigit() and len(number) <= DIGITS_MAX):
            raise BadHostList(f"{text[:40]!r} is no range of numbers")
    count = int(last) - int(first) + 1
    if count < 1:
        raise BadHostList(f"{text[:40]!r} runs backwards")
    return first, count


def _size(choices: list[tuple[str, int]]) -> int:
    return sum(count for _, count in choices)


def _values(choices: list[tuple[str, int]]) -> Iterator[str]:
    for first, count in choices:
        if count == 1:
            yield first
        else:
            yield from (f"{int(first) + step:0{len(first)}d}" for step in range(count))


# States, as one table for the server and the Slurm orchestrator.
#
# A job or node has a base state and any number of flags (sinfo(1), scontrol(1), Slurm's "Job State Codes"). JSON and
# sinfo's StateComplete list them all; squeue's columns show one, a flag rather than the base state ("COMPLETING" for a
# job that FAILED), which does not tell how the job ended.
#
# Slurm's releases add flags: an unknown one next to a known base state is ignored. Without a known base state the state
# is "unknown": neither running nor ended, and never usable.

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

# A job has exactly one; final states come first, in case there are two.
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
# These override any base state: that of a requeued job may still describe the end of its last run.
JOB_DECIDING_FLAGS: Mapping[str, JobPhase] = {
    "REQUEUED": "pending",
    "REQUEUE_HOLD": "pending",
    "REQUEUE_FED": "pending",
    "RESV_DEL_HOLD": "pending",
    "SPECIAL_EXIT": "pending",  # requeued and held, marked by its exit code
    "REVOKED": "cancelled",  # a federation runs it in another cluster
}
# These refine the state of a job that has its nodes. CONFIGURING and POWER_UP_NODE: it is no longer queued (its
# excluded nodes can't be changed any more), but its nodes boot: no process is expected there yet.
JOB_FLAGS_OF_ALLOCATED: Mapping[str, JobPhase] = {
    "COMPLETING": "completing",  # "has finished or been cancelled", with cleanup still running
    "STAGE_OUT": "completing",
    "CONFIGURING": "configuring",
    "POWER_UP_NODE": "configuring",
    "STOPPED": "suspended",  # by SIGSTOP; it keeps its CPUs
}
# With a base state these do not change where the job is. Their meaning if a column shows only the flag:
JOB_OTHER_FLAGS: Mapping[str, JobPhase] = {
    "RESIZING": "running",
    "SIGNALING": "running",  # only running jobs are sent signals
    "EXPEDITING": "pending",  # "immediately eligible for scheduling"
    "LAUNCH_FAILED": "unknown",  # this and the next are reasons for a requeue, not states
    "RECONFIG_FAIL": "unknown",
    "UPDATE_DB": "unknown",  # bookkeeping
}
# With these, processes of the job may still run although its base state says that it has ended or is queued.
ENDING_FLAGS = frozenset({"COMPLETING", "STAGE_OUT"})

# Effect of a name on a node's usability, "": none. "busy": jobs have it. "away": nothing starts there now, and it comes
# back by itself. "down": out of service without having been drained. "unknown": Slurm itself cannot tell.
NODE_BASE_STATES: Mapping[str, NodeEffect] = {
    "IDLE": "",
    "ALLOCATED": "busy",
    "MIXED": "busy",
    "DOWN": "down",
    "ERROR": "down",
    "FUTURE": "down",  # not set up, "expected to be available in the indefinite future": nothing can start there
    "UNKNOWN": "unknown",  # the controller has just started
    "INVALID": "unknown",  # a number without a name in Slurm
}
NODE_FLAGS: Mapping[str, NodeEffect] = {
    "DRAIN": "drained",
    "FAIL": "drained",  # expected to fail soon, according to an administrator
    "INVALID_REG": "down",  # it has less than configured (a GPU too few), until slurmd is restarted
    "COMPLETING": "busy",
    "PERFCTRS": "busy",  # "not usable for any other jobs"
    # Slurm sets it at RESUME, until the node has registered again (scontrol update), and changes it to DOWN if the node
    # stays silent: a resumed node counts as free, or jobs waiting for it would never be released.
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
    # A requested reboot prevents no job before it happens (scontrol reboot; with ASAP there is DRAIN as well). Once
    # issued, the node is away until it has booted; Slurm marks it DOWN if that takes too long.
    "REBOOT_REQUESTED": "",
    "REBOOT_ISSUED": "away",
    "REBOOT_CANCELED": "",
    "CANCEL_REBOOT": "",
    "MAINTENANCE": "maintenance",
    # Slurm knows whose reservation it is and for which job it is planned: it may be ours.
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
# Other names of sinfo: one for a base state and a flag together, arguments of --states, and the short forms.
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
# Suffixes that sinfo appends to a state instead of a flag.
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
    """A job's phase, and whether processes of it may still be ending."""

    phase: JobPhase
    completing: bool


class NodeReading(NamedTuple):
    """A node's state, as read from its names.

    ``drained``: taken out of service, whether finished or not. ``down``: out of service by itself. ``busy``: jobs have
    it. ``away``: nothing starts there now, and it comes back by itself. ``maintenance``: it is reserved for
    maintenance. ``known``: the state is known.
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
    """Return the names in a Slurm state: "mixed+drain", "IDLE*", ["RUNNING", "COMPLETING"]; in capitals.

    A symbol after a node's state becomes its flag. Invalid names, and those beyond NAMES_MAX, are dropped.
    """
    parts = said if isinstance(said, list) else re.split(r"[+ ,]", said) if isinstance(said, str) else []
    names: list[str] = []
    for part in parts[:NAMES_MAX]:
        if isinstance(part, str) and (found := _NAME.match(part)):
            names += [found[1].upper(), *(NODE_SYMBOLS[symbol] for symbol in found[2][: len(NODE_SYMBOLS)])]
    return tuple(names)


def read_job(names: Collection[str], *, preempted: bool = False) -> JobReading:
    """Return a job's phase by its state names.

    ``preempted``: Slurm has asked it to leave, and it keeps its nodes for the grace time of its partition.
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
    """Return a node's state by its state names."""
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
