"""Gemini's simulation (SOSP 2023, section 7): which part of the time trains, on 16 to 1,000 nodes that fail.

Drawn from a seed: failures come at random, as many a node and day as OPT-175B's logbook has. One loses the steps since
the newest checkpoint that was complete, and the time of the restart; nodes that fail meanwhile are lost, too. Where no
node is left with a copy of some shard, the job goes back to storage. Copies lie where our own placement puts them.

The paper's job is GPT-2 100B on 16 p4d.24xlarge: 1.2 TB of state, 20 Gbit/s to storage, 62 s an iteration.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import msgspec

from eagle_eye.checkpoint.placement import ShardPlacement, place

DAY_S = 86_400.0
NODES = (16, 32, 64, 128, 256, 512, 1_000)
FAILURES_PER_NODE_DAY = 0.015  # 110 in two months on OPT-175B's 124 machines of eight A100
HARDWARE = {"all software": 0.0, "half of them": 0.5, "all hardware": 1.0}
REPLICAS = 2

STEP_S = 62.0  # of GPT-2 100B on 16 machines
STATE_BYTES = 1.2e12
RANKS = 128  # of GPUs in the paper's cluster: a rank has 9.4 GB
STORAGE_S = 480.0  # 1.2 TB at 20 Gbit/s, to write or to read
SERIALIZE_S = 81.0  # by torch.save, once a checkpoint that goes to storage
SOFTWARE_S, HARDWARE_S = 420.0, 720.0  # Gemini's whole recovery: detection, two checkpoints saved, replacement, warm-up
SAVED_FIRST_S = 2 * SERIALIZE_S  # of that: both checkpoints in memory are serialized before the restart
STORAGE_EVERY_S = 3 * 3_600.0


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """A way to keep checkpoints, and what it costs.

    Every ``every_s`` of training one is begun, for which training stops for ``blocked_s``; it serves ``complete_s``
    later. ``restart_s`` are for a failure of software and of hardware, without the retrieval: ``retrieve_s`` of both
    kinds from memory, ``STORAGE_S`` from storage. Without ``in_memory`` all is from there.
    """

    every_s: float
    blocked_s: float
    complete_s: float
    restart_s: tuple[float, float]
    retrieve_s: tuple[float, float]
    in_memory: bool = True
    storage_s: float = STORAGE_S


_PLAIN = (SOFTWARE_S - SAVED_FIRST_S, HARDWARE_S - SAVED_FIRST_S)
PAPER = {
    "Gemini": Way(
        every_s=STEP_S, blocked_s=0.0, complete_s=STEP_S, restart_s=(SOFTWARE_S, HARDWARE_S), retrieve_s=(0.0, 3.0)
    ),
    "HighFreq": Way(
        every_s=STORAGE_S, blocked_s=SERIALIZE_S, complete_s=STORAGE_S, restart_s=_PLAIN,
        retrieve_s=(STORAGE_S, STORAGE_S), in_memory=False,
    ),
    "Strawman": Way(
        every_s=STORAGE_EVERY_S, blocked_s=SERIALIZE_S, complete_s=STORAGE_S, restart_s=_PLAIN,
        retrieve_s=(STORAGE_S, STORAGE_S), in_memory=False,
    ),
}  # fmt: skip


def ours(capture: Mapping[str, Any], restore: Mapping[str, Any]) -> Way:
    """Return the paper's job with our measured costs: a rank's 9.4 GB captured at each step, and read again.

    Nothing is serialized before a restart: the store outlives the ranks.
    """
    rank_gb = STATE_BYTES / RANKS / 1e9
    rates = restore["gb_per_s"]
    return Way(
        every_s=STEP_S,
        blocked_s=rank_gb * capture["blocked_ms_per_gb"] / 1e3,
        complete_s=STEP_S,
        restart_s=_PLAIN,
        retrieve_s=(rank_gb / rates["own"]["median"], rank_gb / rates["neighbour"]["median"]),
    )


def measure(seed: int, days: float, more: Mapping[str, Way]) -> dict[str, Any]:
    """Return the part of the time that trains, by way, kind of failures and number of nodes."""
    ways = {**PAPER, **more}
    return {
        "failures_per_node_day": FAILURES_PER_NODE_DAY,
        "days": days,
        "ways": {name: msgspec.to_builtins(way) for name, way in ways.items()},
        "effective_time_ratio": {
            name: {
                kind: {str(nodes): round(effective(way, nodes, share, days, seed), 4) for nodes in NODES}
                for kind, share in HARDWARE.items()
            }
            for name, way in ways.items()
        },
    }


def effective(way: Way, nodes: int, hardware_share: float, days: float, seed: int) -> float:
    """Return which part of so many days trains."""
    chance = random.Random(f"{seed} {nodes} {hardware_share}")
    names = [f"n{number}" for number in range(nodes)]
    placement = place(names, REPLICAS)
    each_s = DAY_S / (nodes * FAILURES_PER_NODE_DAY)
    pace = way.every_s / (way.every_s + way.blocked_s)
    now_s = trained_s = stored_s = 0.0
    while now_s < days * DAY_S:
        ran_s = chance.expovariate(1 / each_s)
        lost_s = way.complete_s + chance.uniform(0.0, way.every_s + way.blocked_s)
        now_s += ran_s
        trained_s += max(0.0, ran_s - lost_s) * pace
        if trained_s - stored_s > STORAGE_EVERY_S:
            stored_s = trained_s - chance.uniform(0.0, STORAGE_EVERY_S)
        gone: set[str] = set()
        down_s = _down(way, hardware_share, names, gone, chance)
        while (next_s := chance.expovariate(1 / each_s)) < down_s:  # another one, before the job trains again
            now_s += next_s
            down_s = _down(way, hardware_share, names, gone, chance)
        if way.in_memory and not _left(placement, gone):
            trained_s = min(trained_s, stored_s)
            down_s += way.storage_s
        now_s += down_s
    return trained_s / now_s


def _down(way: Way, hardware_share: float, names: list[str], gone: set[str], chance: random.Random) -> float:
    """Return how long the job is down for one failure; a node of ``names`` that is lost by it is added to ``gone``."""
    hardware = chance.random() < hardware_share
    if hardware:
        gone.add(chance.choice(names))
    kind = int(bool(gone))
    return way.restart_s[kind] + way.retrieve_s[kind]


def _left(placement: ShardPlacement, gone: set[str]) -> bool:
    return all(set(placement.holders[node]) - gone for node in gone)
