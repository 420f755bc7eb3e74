"""Slurm's words for the states of jobs and nodes, as far as what may be done depends on them. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

JobPhase = Literal[
    "running",
    "pending",
    "completing",
    "suspended",
    "failed",
    "cancelled",
    "preempted",
    "timeout",
    "finished",
    "unknown",
]

# The first row with a word that the job has counts: a requeued job also says how its last run ended.
_PHASES: tuple[tuple[JobPhase, frozenset[str]], ...] = (
    ("pending", frozenset({"REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"})),
    ("cancelled", frozenset({"CANCELLED", "REVOKED"})),
    ("preempted", frozenset({"PREEMPTED"})),
    ("timeout", frozenset({"TIMEOUT", "DEADLINE"})),
    ("completing", frozenset({"COMPLETING", "STAGE_OUT"})),
    ("failed", frozenset({"FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL"})),
    ("finished", frozenset({"COMPLETED"})),
    ("suspended", frozenset({"SUSPENDED", "STOPPED"})),
    ("running", frozenset({"RUNNING", "CONFIGURING", "RESIZING", "SIGNALING", "UPDATE_DB", "EXPEDITING"})),
    ("pending", frozenset({"PENDING", "POWER_UP_NODE"})),
)
_SYMBOLS = "*~#!%$@^-"  # what sinfo hangs on a state: not responding, powered down, ...
_DRAINS = frozenset({"drain", "drained", "draining", "fail", "failing"})
_OUT = _DRAINS | {"down", "error", "unknown", "future", "powered_down", "powering_down", "reboot_issued"}
_BUSY = frozenset({"allocated", "alloc", "mixed", "mix", "completing", "comp", "blocked"})


def job_phase(words: Collection[str], *, preempted: bool = False) -> JobPhase:
    """Return where a job is. ``preempted``: Slurm has asked it to leave, and it runs for its grace time."""
    said = {word.upper() for word in words}
    phase: JobPhase = next((phase for phase, known in _PHASES if said & known), "unknown")
    return "preempted" if preempted and phase in ("running", "completing") else phase


def node_words(state: str) -> frozenset[str]:
    """Return the words of a node's state as sinfo writes it: "mixed+drain", "idle*", "ALLOCATED+DRAIN"."""
    parts = state.lower().replace(",", "+").split("+")
    return frozenset(word for part in parts if (word := part.strip().rstrip(_SYMBOLS)))


def is_drained(words: frozenset[str]) -> bool:
    """Whether somebody has drained the node, done or not."""
    return bool(words & _DRAINS)


def is_usable(words: frozenset[str]) -> bool:
    """Whether Slurm would start jobs on the node now or once it is free."""
    return bool(words) and not words & _OUT


def is_free(words: frozenset[str]) -> bool:
    """Whether nothing runs on the node, and something could."""
    return is_usable(words) and not words & _BUSY
