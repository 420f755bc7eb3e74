"""What others' checkpoints cost the same job: each saves at every step at which it may, in turns in one job.

A save that is due while an earlier one is under way is left out, not waited for: so none is charged for a pace that it
is not made for. ``steps_lost`` is how many steps the newest checkpoint that a restart would find lies behind, on
average over all the time, looked at fifty times a second: what a failure at any moment costs, beside the step that it
interrupts. A step that is done and still being saved is behind.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.checkpoint.site import opened, run_ranks

NODES = ["n1", "n2"]
NONE = "no checkpoints"
# Those with a distribution are looked for in --peers-path.
WAYS: dict[str, str | None] = {
    NONE: None,
    "Eagle Eye": None,
    "torch DCP async_save": None,
    "torch DCP async_save, cached staging": None,
    "nvidia-resiliency-ext 0.4.1 local": "nvidia_resiliency_ext",
    "nvidia-resiliency-ext 0.4.1 local, async": "nvidia_resiliency_ext",
    "nvidia-resiliency-ext 0.4.1 local, replicated": "nvidia_resiliency_ext",
    "dlrover 0.6.1 flash checkpoint": "dlrover",
    "lm-resiliency 0.2.0": "lm_resiliency",
}
START_S = 300.0
PEERS_VARIABLE = "EAGLE_EYE_PEERS"


class PeersPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks do: ``rounds`` times a block of ``steps`` steps by each way, in an order by the seed."""

    width: int
    blocks: int
    step_s: float
    steps: int
    rounds: int
    seed: int
    ways: tuple[str, ...] = tuple(WAYS)


def measure(plan: PeersPlan, peers_path: Path | None) -> dict[str, Any]:
    """Return the figures of each way, or why there are none: its ``error``."""
    missing = {
        way
        for way, package in WAYS.items()
        if package is not None and not (peers_path is not None and (peers_path / package).is_dir())
    }
    plan = msgspec.structs.replace(plan, ways=tuple(way for way in WAYS if way not in missing))
    ranks = _ranks(plan, peers_path)
    undisturbed_s = statistics.median(ranks[0][NONE]["steps_s"])
    return {
        way: {"error": "not installed"} if way in missing else figures([rank[way] for rank in ranks], undisturbed_s)
        for way in WAYS
    }


def figures(ranks: list[dict[str, Any]], undisturbed_s: float) -> dict[str, Any]:
    """Return the figures of one way, of what both ranks have found. The slower rank counts."""
    if failed := next((rank["error"] for rank in ranks if "error" in rank), None):
        return {"error": failed}
    blocked = sorted(max(both) for both in zip(*(rank["blocked_s"] for rank in ranks), strict=True))
    lost = [value for rank in ranks for value in rank["behind_steps"]]
    step_s = statistics.median(ranks[0]["steps_s"])
    return {
        "step_s": round(step_s, 4),
        "longer_ratio": round(step_s / undisturbed_s - 1, 4),
        "blocked_ms": {"p50": _ms(blocked, 0.5), "p95": _ms(blocked, 0.95), "least": _ms(blocked, 0.0)},
        "saved_ratio": round(len(blocked) / len(ranks[0]["steps_s"]), 3),
        "steps_lost": round(statistics.fmean(lost), 2) if blocked and lost else None,
        "survives": ranks[0]["survives"],
    }


def _ranks(plan: PeersPlan, peers_path: Path | None) -> list[dict[str, Any]]:
    more = {} if peers_path is None else {PEERS_VARIABLE: str(peers_path.absolute())}
    within_s = START_S + 10 * len(plan.ways) * plan.rounds * plan.steps * plan.step_s
    with opened(NODES) as site:
        found: list[dict[str, Any]] = run_ranks(site, "benchmarks.checkpoint.peers_rank", NODES, plan, within_s, more)
        return found


def _ms(sorted_s: list[float], part: float) -> float | None:
    return round(1e3 * sorted_s[min(len(sorted_s) - 1, int(part * len(sorted_s)))], 2) if sorted_s else None
