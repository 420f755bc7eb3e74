"""Fleet overview: what is observed of each job, what it currently loses, and each node's standing. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from eagle_eye.server.accounts.timeline import LATE_FLOOR_S, LATE_STEPS, stops_jobs
from eagle_eye.server.engine.ledger import Phase
from eagle_eye.server.model.records import Incident
from eagle_eye.server.monitor.watcher import JobProgress

# Names for the groups of observed metrics, with their name prefixes.
FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "GPUs": ("gpu_",),
        "steps": ("train_step",),
        "NCCL": ("nccl_",),
        "hosts": ("node_cpu", "node_memory", "node_io", "node_blocked"),
        "network": ("link_", "node_rdma", "node_network"),
    }
)
# Of a node, the worst first. accused: a confirmed incident names it; suspected: an unconfirmed one does; silent: not
# heard recently; unheard: not since the server started.
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
    """What a job loses at present.

    ``gpus`` is the loss in GPUs' worth of work, None if their number is unknown; ``incident_id`` "": no incident
    explains it.
    """

    kind: Literal["stopped", "slow", "unexplained"]
    since_s: float
    gpus: float | None
    incident_id: str = ""
    fault: str = ""

    def gpu_hours(self, now_s: float) -> float | None:
        """Return the loss since it began."""
        return None if self.gpus is None else self.gpus * max(now_s - self.since_s, 0.0) / 3600.0


def not_seen(metrics: Iterable[str]) -> list[str]:
    """Return the groups of metrics of which a job has none."""
    names = tuple(metrics)
    return [part for part, begins in FAMILIES.items() if not any(name.startswith(begins) for name in names)]


def loss(course: JobProgress, incidents: Iterable[Incident], now_s: float) -> Loss | None:
    """Return the job's loss at ``now_s``, or None; ``incidents`` are its own, of any state and attempt.

    As in goodput: a stopped job loses all its GPUs, a slow one the share that its worst slowness costs. A pause of more
    than three steps (and at least a minute) is reported too, though it may be a checkpoint or an evaluation: goodput
    counts that time as unknown until an incident explains it. None for a job of which no node is heard.
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
    """Return the nodes that incidents name, each with the standing from the gravest."""
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
    """Return a node's standing from its incidents, its phase, and whether it is heard (None: never was)."""
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
    """Return the names of the nodes' places, and for each node the index of its own; -1: unknown."""
    index: dict[str, int] = {}
    found = []
    for node in nodes:
        name = place_of.get(node, "")
        found.append(index.setdefault(name, len(index)) if name else -1)
    return list(index), found
