"""The faults that are drawn, what each does to a job's nodes, and what has to come of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.soak.fleet import Agents, Membership, exits
from eagle_eye.schema.events import Event

SEGMENTATION_FAULT, TERMINATED = -11, -15
SLOW_COMPUTE, SLOW_STEP = 1.6, 1.4


class Kind(NamedTuple):
    """A fault; ``names`` are those that an incident may have, ``excludes`` whether its node has to leave."""

    name: str
    names: frozenset[str]
    excludes: bool
    within_s: float  # from the fault to the request to act, while a server runs


KINDS = (
    Kind("gpu_lost", frozenset({"gpu_lost"}), True, 15.0),
    Kind("gpu_memory_error", frozenset({"gpu_memory_error"}), True, 15.0),
    Kind("process_crash", frozenset({"process_crash"}), False, 20.0),
    Kind("node_unreachable", frozenset({"node_unreachable"}), True, 45.0),
    Kind("hang", frozenset({"hang"}), True, 90.0),
    Kind("thermal_throttle", frozenset({"thermal_throttle"}), True, 120.0),
)
BY_NAME = {kind.name: kind for kind in KINDS}


@dataclass
class Fault:
    """One that was injected. ``incidents`` and ``actions`` are what the subscriber heard of, by id.

    ``waited_s`` is for how long a server has run since then that should have found it.
    """

    kind: Kind
    job: str
    attempt: int
    node: str
    at: int
    device: int
    began_s: float
    incidents: list[str] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    waited_s: float = 0.0
    reported_s: float | None = None
    asked_s: float | None = None
    over_s: float | None = None


async def inject(fault: Fault, agents: Agents, places: list[int], member: Membership) -> None:
    """Let it happen to the job whose nodes have these places; ``member`` is the faulty node's."""
    at, device, name = fault.at, fault.device, fault.kind.name
    if name == "thermal_throttle":
        for place in places:
            agents.slow_down(place, SLOW_STEP, compute=SLOW_COMPUTE if place == at else 1.0)
        agents.heat(at)
        return
    for place in places:
        agents.stall(place)
    now_s = time.time()
    if name == "gpu_lost":
        agents.tell(at, [Event(now_s, "xid", device, {"code": 79, "text": "GPU has fallen off the bus."})])
    elif name == "gpu_memory_error":
        agents.tell(at, [Event(now_s, "xid", device, {"code": 95, "text": "Uncontained ECC error"})])
    elif name == "process_crash":
        agents.tell(at, [exits(member, device, SEGMENTATION_FAULT, goodbye=False)])
    elif name == "node_unreachable":
        await agents.kill(at)
    elif name == "hang":
        agents.silence(at, device)
