"""Decides what may be done with a job and its nodes, and how, from Slurm's data. Pure.

A job is a tuple of ``answers.SlurmJob``: one, or all components of a heterogeneous one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from eagle_eye.orchestrators.fallback_layouts import no_spare, nodes_by_plan
from eagle_eye.orchestrators.protocol import CannotCarryOutError, Cause
from eagle_eye.orchestrators.slurm.answers import SlurmJob, SlurmNode
from eagle_eye.planning.plan import Plan
from eagle_eye.schema.slurm import JobPhase

# Reasons of our drains: their owner, the incident, and a checksum that shows changes.
#
# Slurm keeps one reason per node, and writing another one takes the drain over. So our reasons end with a checksum of
# themselves: a reason changed in any way is no longer ours.
Tag = Literal["node_problem", "user_problem"]

REASON_CHARS_MAX = 255
NAME_CHARS_MAX = 64
# Faults of what the job computes, not of where: its node is excluded because the fault would recur there.
USER_FAULTS = frozenset(
    {
        "application_error",
        "process_crash",
        "out_of_memory",
        "loss_not_finite",
        "loss_divergence",
        "loss_spike",
        "workload_imbalance",
        "throughput_drop",
    }
)
_OURS = re.compile(
    r"(?P<text>eagle-eye \[(?P<tag>node_problem|user_problem)\] incident:(?P<incident>\S+) action:(?P<action>\S+)"
    r" by:(?P<owner>\S+) .*) #(?P<sum>[0-9a-f]{8})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Drain:
    """The contents of one of our reasons, unchanged since it was written."""

    tag: Tag
    incident_id: str
    action_id: str
    owner: str


def tag_of(fault: str) -> Tag:
    """Return whether a fault is the node's, or the program's that runs there."""
    return "user_problem" if fault in USER_FAULTS else "node_problem"


def reason_of(cause: Cause, owner: str) -> str:
    """Return the reason for a drain: one line of plain ASCII, at most REASON_CHARS_MAX characters."""
    ids = f"incident:{_word(cause.incident_id)} action:{_word(cause.action_id)} by:{_word(owner)}"
    text = f"eagle-eye [{tag_of(cause.fault)}] {ids} {_plain(cause.reason)}"
    text = text[: REASON_CHARS_MAX - 10].rstrip()
    return f"{text} #{_checksum(text)}"


def drain_of(reason: str) -> Drain | None:
    """Return the contents of one of our reasons; None for others' and for changed ones."""
    found = _OURS.fullmatch(reason)
    if found is None or found["sum"] != _checksum(found["text"]):
        return None
    tag: Tag = "user_problem" if found["tag"] == "user_problem" else "node_problem"
    return Drain(tag, found["incident"], found["action"], found["owner"])


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode("ascii", "replace")).hexdigest()[:8]


def _word(text: str) -> str:
    """Return a name as one word: ids are untrusted and must not forge the rest of the reason."""
    return re.sub(r"[^A-Za-z0-9._:@-]", "_", text)[:NAME_CHARS_MAX] or "-"


def _plain(text: str) -> str:
    """Return what survives Slurm's and sudo's argument parsing: quotes and non-ASCII do not.

    "=" is also removed, so that a sudo rule can distinguish a reason from another setting.
    """
    return " ".join(re.sub(r"[^A-Za-z0-9 ._:,;/%()+*@-]", "?", text).split()) or "-"


Way = Literal["requeue", "resubmit"]
WhenFull = Literal["queue", "hold", "refuse"]

# The job continues, only slower: stopping it without a replacement for the node would lose more than the fault does.
SLOWNESS = frozenset(
    {
        "straggler",
        "thermal_throttle",
        "power_throttle",
        "pcie_degraded",
        "nic_degraded",
        "nvlink_degraded",
        "cpu_contention",
    }
)
HOLDS_NODES: tuple[JobPhase, ...] = ("running", "configuring")  # in which a job can be stopped to start elsewhere
_AFTER_THE_END: tuple[JobPhase, ...] = ("failed", "finished", "pending")
_WHY_NOT: dict[JobPhase, str] = {
    "cancelled": "was cancelled: somebody meant it to stop",
    "preempted": "was preempted: Slurm starts it again itself, if it is to be",
    "timeout": "reached its time limit",
    "finished": "has finished",
    "suspended": "is suspended: whoever did that resumes it",
    "completing": "has processes that are still ending",
    "pending": "waits in the queue and runs nowhere",
    "unknown": "is in a state that is not known here",
}


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many nodes a job wants, how many of its partitions could be used at all, and how many at once.

    With a ``plan`` it also runs on fewer.
    """

    wanted: int
    usable: int
    free: int
    plan: Plan | None = None

    @property
    def least(self) -> int:
        """The fewest nodes that it runs on."""
        return self.wanted if self.plan is None else self.plan.nodes_min

    @property
    def starts_on(self) -> int:
        """How many nodes it waits for: by plan as many as are free now, if that is enough."""
        if self.plan is None or self.free >= self.wanted:
            return self.wanted
        return nodes_by_plan(self.plan, self.free) or self.least

    @property
    def loss(self) -> str:
        """What it loses by starting on fewer nodes than it wants; "" where it does not."""
        if self.plan is None or self.starts_on >= self.wanted:
            return ""
        return no_spare(self.plan, self.starts_on, self.wanted)


def phase_of(jobs: Sequence[SlurmJob]) -> JobPhase:
    """Return the job's phase: that of all its components, else of the one furthest from running.

    It is also "completing" where it has failed, finished or waits again while processes of it may still run: it is
    neither started nor considered ended before they are gone.
    """
    order: tuple[JobPhase, ...] = (
        *("cancelled", "preempted", "timeout", "suspended", "unknown", "completing", "pending"),
        *("failed", "finished", "configuring", "running"),
    )
    phases = {job.phase for job in jobs}
    phase = next(phase for phase in order if phase in phases)
    return "completing" if phase in _AFTER_THE_END and any(job.completing for job in jobs) else phase


def restarts_of(jobs: Sequence[SlurmJob]) -> int:
    """Return how often the job was restarted: the attempt as counted by the server."""
    return max(job.restarts for job in jobs)


def title_of(jobs: Sequence[SlurmJob]) -> str:
    """Return the job's name for people."""
    first = jobs[0]
    if len(jobs) > 1:
        return f"job {first.het_id or first.id} (heterogeneous, {len(jobs)} components)"
    return f"job {first.id} (task {first.name})" if first.array_id else f"job {first.id}"


def way_of(jobs: Sequence[SlurmJob], without: Collection[str], required: Collection[str]) -> Way:
    """Return how the job can start again; ``required`` are nodes that it requests by name.

    Raises CannotCarryOutError.
    """
    title, phase = title_of(jobs), phase_of(jobs)
    if phase not in (*HOLDS_NODES, "failed"):
        words = "+".join(dict.fromkeys(word for job in jobs for word in job.words))
        raise CannotCarryOutError(f"{title} {_WHY_NOT[phase]} ({words}); nothing was done")
    if asked := sorted(set(without) & set(required)):
        raise CannotCarryOutError(
            f"{title} asks for {', '.join(asked)} by name (--nodelist): it cannot run without; nothing was done"
        )
    if not all(job.batch for job in jobs):
        raise CannotCarryOutError(f"{title} is interactive (salloc, srun): there is no script to start again")
    if all(job.requeues for job in jobs):
        return "requeue"
    if len(jobs) > 1 or jobs[0].array_id:
        kind = "a heterogeneous job" if len(jobs) > 1 else "a task of an array"
        raise CannotCarryOutError(f"{title} may not be requeued (Requeue=0), and {kind} cannot be submitted again")
    if phase == "failed":
        raise CannotCarryOutError(f"{title} has ended and may not be requeued (Requeue=0)")
    return "resubmit"


def capacity_of(
    jobs: Sequence[SlurmJob],
    nodes: Iterable[SlurmNode],
    without: Collection[str],
    own: Collection[str],
    wanted: int = 0,
    plan: Plan | None = None,
) -> Capacity:
    """Return the room for the job without some nodes; its ``own`` ones are free once it has stopped.

    ``wanted`` is how many it had before it shrank, by ``plan``; 0: it never did. ``usable`` is an upper bound: the
    job's other constraints (features, reservations, sizes) are left to Slurm.
    """
    partitions = frozenset().union(*(job.partitions for job in jobs))
    candidates = [
        node
        for node in nodes
        if node.usable and node.name not in without and (not partitions or node.partitions & partitions)
    ]
    free = sum(node.free or node.name in own for node in candidates)
    return Capacity(max(wanted, sum(job.nodes_wanted for job in jobs)), len(candidates), free, plan)


def refusal_for_room(fault: str, room: Capacity, when_full: WhenFull) -> str:
    """Return why restarting the job into a full cluster would be worse than leaving it alone, "" where it is not."""
    if room.usable < room.least and fault in SLOWNESS:
        return f"{_needs(room)} and {room.usable} others can be used: it would not run again, and {fault} only slows it"
    if room.free < room.least and when_full == "refuse":
        return f"{_needs(room)} and {room.free} would be free (--when-full refuse)"
    return ""


def hold_for_room(room: Capacity, when_full: WhenFull) -> str:
    """Return why the stopped job is held instead of queued, "" where it is queued."""
    if room.usable < room.least:
        return f"{_needs(room)} and {room.usable} can be used" + (": it waits for a spare" if room.plan else "")
    if room.free < room.least and when_full == "hold":
        return f"{_needs(room)} and {room.free} are free (--when-full hold)"
    return ""


def _needs(room: Capacity) -> str:
    return f"it wants {room.wanted} nodes" if room.plan is None else f"its plan's layouts need {room.least} nodes"


def foreign(node: SlurmNode, owner: str) -> str:
    """Return why we must not undrain a node, "" where we may."""
    drain = drain_of(node.reason)
    if drain is None:
        written = "its reason is not as we wrote it" if node.reason.startswith("eagle-eye") else "not by us"
        return f"{node.name} is drained, {written}: {node.reason or 'no reason given'}"
    if drain.owner != owner:
        return f"{node.name} is drained by {drain.owner}, and we are {owner} (--owner)"
    return ""
