"""The fleet at a glance: what of each job is seen, what it costs right now, and how each node stands. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from eagle_eye.server.accounts.timeline import LATE_FLOOR_S, LATE_STEPS, stops_jobs
from eagle_eye.server.engine.standing import Phase
from eagle_eye.server.model.records import Incident
from eagle_eye.server.monitor.watcher import JobProgress

# What people call a part of what is observed, and how its metrics' names begin.
FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "GPUs": ("gpu_",),
        "steps": ("train_step",),
        "NCCL": ("nccl_",),
        "hosts": ("node_cpu", "node_memory", "node_io", "node_blocked"),
        "network": ("link_", "node_rdma", "node_network"),
    }
)
# Of a node, the worst first. accused: an incident that is confirmed names it; suspected: one that is not; silent: not
# heard of late; unheard: not since the server started.
Standing = Literal[
    "accused", "suspected", "excluded", "draining", "checking", "silent", "unheard", "watched", "in_service"
]
STANDINGS: tuple[Standing, ...] = (
    "accused",
    "suspected",
    "excluded",
    "draining",
    "checking",
    "silent",
    "unheard",
    "watched",
    "in_service",
)
LIVE_STATES = frozenset({"suspected", "confirmed", "acting"})  # of incidents whose trouble goes on


class Loss(NamedTuple):
    """What a job loses at the moment. ``gpus`` is how many GPUs' worth of work is lost, None where nobody knows
    how many there are; ``incident_id`` "": no incident says why no step is made.
    """  # noqa: D205 - one thought

    kind: Literal["stopped", "slow", "unexplained"]
    since_s: float
    gpus: float | None
    incident_id: str = ""
    fault: str = ""

    def gpu_hours(self, now_s: float) -> float | None:
        """Return what was lost since it began."""
        return None if self.gpus is None else self.gpus * max(now_s - self.since_s, 0.0) / 3600.0


def not_seen(metrics: Iterable[str]) -> list[str]:
    """Return the parts of what is observed of which a job's metrics show nothing."""
    names = tuple(metrics)
    return [part for part, begins in FAMILIES.items() if not any(name.startswith(begins) for name in names)]


def loss(course: JobProgress, incidents: Iterable[Incident], now_s: float) -> Loss | None:
    """Return what the job loses at ``now_s``, or None; ``incidents`` are its own, of any state and attempt.

    As goodput counts it: a job that stands still loses all its GPUs, a slow one the share that its worst slowness
    costs. That no step was made for longer than three steps (a minute at least) is told too, though it may be a
    checkpoint or an evaluation: goodput calls that time unknown until an incident says why. Of a job of which no node
    is heard nobody can tell.
    """
    if course.state != "running" or not course.heard:
        return None
    mine = [i for i in incidents if i.attempt == course.attempt and i.state in LIVE_STATES and not i.merged_into]
    gpus = None if course.gpus is None else float(course.gpus)
    stops = [i for i in mine if stops_jobs(i)]
    if stops:
        first = min(stops, key=lambda i: i.onset_s)
        return Loss("stopped", first.onset_s, gpus, first.id, first.fault)
    if course.progressed_s is not None and course.step_s is not None:
        late_s = max(LATE_STEPS * course.step_s, LATE_FLOOR_S)
        if now_s - course.progressed_s > late_s:
            return Loss("unexplained", course.progressed_s, gpus)
    slow = [i for i in mine if i.slowdown_ratio > 0.0]
    if slow:
        worst = max(slow, key=lambda i: i.slowdown_ratio)
        share = worst.slowdown_ratio / (1.0 + worst.slowdown_ratio)
        return Loss("slow", worst.onset_s, None if gpus is None else share * gpus, worst.id, worst.fault)
    return None


def accused(incidents: Iterable[Incident]) -> dict[str, Standing]:
    """Return the nodes that incidents name, each with what the gravest makes of it."""
    found: dict[str, Standing] = {}
    for incident in incidents:
        if incident.state not in LIVE_STATES or incident.merged_into:
            continue
        standing: Standing = "suspected" if incident.state == "suspected" else "accused"
        for node in incident.nodes:
            if found.get(node) != "accused":
                found[node] = standing
    return found


def standing(phase: Phase, word: Standing | None, fresh: bool | None) -> Standing:
    """Return how a node stands: by what incidents say of it, its phase, and whether it is heard (None: never was)."""
    if word is not None:
        return word
    if phase in ("excluded", "draining", "checking"):
        return phase
    if fresh is None:
        return "unheard"
    if not fresh:
        return "silent"
    return phase


def places_of(nodes: Sequence[str], place_of: Mapping[str, str]) -> tuple[list[str], list[int]]:
    """Return the names of the nodes' places, and for each node which of them is its own; -1: not known."""
    index: dict[str, int] = {}
    found = []
    for node in nodes:
        name = place_of.get(node, "")
        found.append(index.setdefault(name, len(index)) if name else -1)
    return list(index), found
