"""What a soak has shown: each claim with what was found, and the growth of each quantity in the second half."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np

from benchmarks.soak.growth import growth
from benchmarks.soak.looks import QUANTITIES, Look
from benchmarks.soak.plan import HALF
from benchmarks.soak.soak import Soak

# Of the machine, or of how many nodes the jobs have just then, as much as of the server: they count as grown only where
# their whole interval lies above the limit.
SHARED = frozenset(
    {
        "acknowledged_p50_s",
        "acknowledged_p99_s",
        "detection_s",
        "api_s",
        "scrape_s",
        "cpu_ratio",
        "windows_bytes",
        "job_scrape_bytes",
    }
)
NOT_JUDGED = frozenset({"children_rss_bytes", "levels_bytes"})  # compaction, and hours of the clock: they come and go


def report(soak: Soak) -> dict[str, Any]:
    """Return the figures and whether all that is claimed held."""
    judged = {name: growth(*_second_half(soak, name)) for name in (*QUANTITIES, "cpu_ratio")}
    claims = _claims(soak)
    long_enough = any(math.isfinite(one.ratio) for one in judged.values())
    grown = [name for name, one in judged.items() if name not in NOT_JUDGED and _has_grown(name, one.word)]
    if long_enough:
        claims["nothing grows in the second half"] = {"held": not grown, "found": ", ".join(grown) or "all flat"}
    world, tally = soak.world, soak.agents.tally
    return {
        "held": all(claim["held"] for claim in claims.values()),
        "claims": claims,
        "growth": {name: {k: _plain(v) for k, v in one._asdict().items()} for name, one in judged.items()},
        "judged": long_enough,
        "seconds": soak.plan.duration_s,
        "nodes": soak.plan.nodes,
        "gpus": soak.plan.gpus,
        "seed": soak.plan.seed,
        "frames_acknowledged": tally.acknowledged,
        "samples_acknowledged": tally.samples_acknowledged,
        "duplicates_sent": tally.duplicates,
        "asked_to_wait": dict(tally.asked_to_wait),
        "errors": dict(tally.errors),
        "said": tally.said,
        "server_starts": len(soak.server_starts_s),
        "server_start_seconds_max": max(soak.server_starts_s, default=0.0),
        "subscriber_starts": soak.site.subscriber.starts,
        "webhooks": len(soak.received.events),
        "webhooks_sent_again": soak.received.repeated,
        "counts": dict(world.counts),
        "faults": _faults(soak),
        "incidents_without_fault": dict(world.unexplained),
        "generator_cpu_ratio": soak.generator_cpu_ratio,
        "course": _course(soak.looks),
        "wrong": world.wrong,
    }


def _claims(soak: Soak) -> dict[str, dict[str, Any]]:
    world, received, stored = soak.world, soak.received, soak.stored
    over = [fault for fault in world.faults if fault.over_s is not None]
    single = [fault for fault in over if len(fault.incidents) == 1 and len(fault.actions) == 1]
    bad = {name: count for name, count in received.faults.items() if count}
    frames = soak.agents.tally.acknowledged
    return {
        "nothing acknowledged is missing": {"held": soak.missing == 0, "found": f"{soak.missing} of {frames}"},
        "nothing is stored twice": {"held": stored.twice == 0, "found": f"{stored.twice} of {stored.frames}"},
        "no frame is refused": {"held": soak.agents.reported().refused == 0, "found": f"{soak.agents.ledger.refused}"},
        "one incident and one action for each fault": {
            "held": len(single) == len(world.faults),
            "found": f"{len(single)} of {len(world.faults)}",
        },
        "webhooks are signed, in order and not repeated": {"held": not bad, "found": f"{bad or len(received.events)}"},
        "what was delivered is what was received": {
            "held": soak.undelivered + soak.altered == 0,
            "found": f"{soak.undelivered} not received, {soak.altered} different",
        },
        "nothing else is wrong": {"held": not world.wrong, "found": f"{len(world.wrong)}"},
    }


def _faults(soak: Soak) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in sorted({fault.kind.name for fault in soak.world.faults}):
        mine = [fault for fault in soak.world.faults if fault.kind.name == kind]
        took = [fault.asked_s - fault.began_s for fault in mine if fault.asked_s is not None]
        found[kind] = {
            "faults": len(mine),
            "incidents": dict(Counter(len(fault.incidents) for fault in mine)),
            "actions": dict(Counter(len(fault.actions) for fault in mine)),
            "seconds_to_action_p50": float(np.median(took)) if took else None,
            "seconds_to_action_max": max(took, default=None),
        }
    return found


def _second_half(soak: Soak, name: str) -> tuple[list[float], list[float]]:
    """Return when it was looked at in the second half, and what was seen, of the server's last life alone."""
    begin_s = HALF * soak.plan.duration_s
    last = soak.looks[-1].life if soak.looks else 0
    looks = [one for one in soak.looks if begin_s <= one.time_s <= soak.plan.duration_s and one.life == last]
    if name != "cpu_ratio":
        return [one.time_s for one in looks], [getattr(one, name) for one in looks]
    pairs = list(itertools.pairwise(looks))
    ratios = [(late.cpu_s - early.cpu_s) / (late.time_s - early.time_s) for early, late in pairs]
    return [late.time_s for _, late in pairs], ratios


def _has_grown(name: str, word: str) -> bool:
    return word == "grows" or (word == "cannot tell" and name not in SHARED)


def _course(looks: list[Look]) -> list[dict[str, Any]]:
    """Return the medians of sixty stretches of the whole time."""
    parts = [part for part in np.array_split(np.arange(len(looks)), 60) if len(part)]
    found = []
    for part in parts:
        mine = [looks[at] for at in part.tolist()]
        medians = {name: _median([getattr(one, name) for one in mine]) for name in QUANTITIES}
        found.append({"time_s": mine[0].time_s, "life": mine[-1].life, **medians})
    return found


def _median(values: list[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return float(np.median(known)) if known else None


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
