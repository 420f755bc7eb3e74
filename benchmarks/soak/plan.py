"""How long a soak takes, how often what happens in it, and when what is restarted. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

HALF = 0.5
WINDOW_S = 300.0  # what detectors look back; slowness has to last for a minute of it
QUICK = ("gpu_lost", "gpu_memory_error", "process_crash", "node_unreachable", "hang")  # of which it is soon known
SLOW_FROM_S = 900.0  # a shorter soak has no slow nodes
SETTLED = 0.3  # of the time: after it the server is left alone, so that its second half is one undisturbed life
FLEET_RESTARTS = (0.05, 0.12, 0.2)  # of the time: what an agent said before is remembered for a while after its restart


@dataclass(frozen=True)
class Plan:
    """One soak. ``every_s``: from one to the next on average: faults, nodes that leave, agents that are restarted."""

    duration_s: float
    nodes: int
    gpus: int
    seed: int
    look_s: float
    job_s: float
    calm_s: float  # an attempt runs for so long before something happens to it
    kinds: tuple[str, ...] = ()  # of faults; (): all
    every_s: dict[str, float] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=dict)
    server_restarts: tuple[tuple[float, str], ...] = ()  # seconds from the beginning, and by what
    fleet_restarts: tuple[float, ...] = ()
    subscriber_kills: tuple[float, ...] = ()


def plan(duration_s: float, nodes: int, gpus: int, seed: int) -> Plan:
    """Return the plan of a soak of so many seconds."""
    chance = random.Random(seed)
    calm_s = min(60.0, 0.1 * duration_s)
    disturbed_s = SETTLED * duration_s - calm_s
    restarts = max(2, min(10, int(disturbed_s / 60.0)))
    times_s = [calm_s + disturbed_s * (number + chance.uniform(0.2, 0.8)) / restarts for number in range(restarts)]
    retention_s = max(60.0, min(480.0, duration_s / 8))
    kill_s = max(15.0, min(180.0, duration_s / 8))
    return Plan(
        duration_s=duration_s,
        nodes=nodes,
        gpus=gpus,
        seed=seed,
        look_s=max(1.0, min(5.0, duration_s / 120)),
        calm_s=max(8.0, min(30.0, duration_s / 10)),
        job_s=max(60.0, min(300.0, duration_s / 4)),
        kinds=() if duration_s >= SLOW_FROM_S else QUICK,
        every_s={
            "fault": max(8.0, min(30.0, 15_000.0 / nodes)),
            "node": max(4.0, min(15.0, 7_500.0 / nodes)),
            "agent": max(3.0, min(10.0, 5_000.0 / nodes)),
        },
        settings={
            "segment_s": max(10.0, retention_s / 8),
            "retention_s": retention_s,
            "minutes_s": 2 * retention_s,
            "window_s": WINDOW_S,
        },
        server_restarts=tuple((at_s, "kill" if at % 2 else "terminate") for at, at_s in enumerate(times_s)),
        fleet_restarts=tuple(share * duration_s for share in FLEET_RESTARTS),
        subscriber_kills=tuple(
            kill_s * (number + chance.uniform(0.3, 0.7)) for number in range(1, int(0.9 * duration_s / kill_s))
        ),
    )
