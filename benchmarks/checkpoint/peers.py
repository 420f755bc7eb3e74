"""What others' checkpoints cost the same job: each saves at every step at which it may, one job after the other.

A save that is due while an earlier one is under way is left out, not waited for: so none is charged for a pace that it
is not made for. ``steps_lost`` is how many steps the newest checkpoint that a restart would find lies behind, on
average over the ends of all steps: what a failure at any moment costs, beside the step that it interrupts.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.checkpoint.site import RankFailed, opened, run_ranks

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
START_S = 180.0


class PeersPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of one job do: ``steps`` steps, each saved by one ``way`` if it may be."""

    width: int
    blocks: int
    step_s: float
    steps: int
    seed: int
    way: str = NONE


def measure(plan: PeersPlan, rounds: int, peers_path: Path | None) -> dict[str, Any]:
    """Return the figures of each way, or why there are none: its ``error``."""
    found: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in WAYS}
    errors: dict[str, str] = {}
    for _ in range(rounds):
        for way, package in WAYS.items():
            if way in errors:
                continue
            if package is not None and not (peers_path is not None and (peers_path / package).is_dir()):
                errors[way] = "not installed"
                continue
            try:
                found[way].append(_ranks(msgspec.structs.replace(plan, way=way), peers_path if package else None))
            except RankFailed as error:
                errors[way] = _last_line(str(error))
    undisturbed_s = _step_s(found[NONE])
    return {
        way: {"error": errors[way]} if way in errors else figures(ranks, undisturbed_s) for way, ranks in found.items()
    }


def figures(jobs: list[list[dict[str, Any]]], undisturbed_s: float) -> dict[str, Any]:
    """Return the figures of one way's jobs, each a list of what its ranks have found. The slower rank counts."""
    blocked = sorted(max(both) for ranks in jobs for both in zip(*(rank["blocked_s"] for rank in ranks), strict=True))
    step_s = _step_s(jobs)
    lost = [value for ranks in jobs for rank in ranks for value in rank["behind_steps"]]
    steps = sum(len(ranks[0]["steps_s"]) for ranks in jobs)
    return {
        "step_s": round(step_s, 4),
        "longer_ratio": round(step_s / undisturbed_s - 1, 4),
        "blocked_ms": {"p50": _ms(blocked, 0.5), "p95": _ms(blocked, 0.95)},
        "saved_ratio": round(len(blocked) / steps, 3),
        "steps_lost": round(statistics.fmean(lost), 2) if blocked else None,
        "survives": jobs[0][0]["survives"],
    }


def _ranks(plan: PeersPlan, peers_path: Path | None) -> list[dict[str, Any]]:
    more = {} if peers_path is None else {"EAGLE_EYE_PEERS": str(peers_path.absolute())}
    within_s = START_S + 10 * plan.steps * plan.step_s
    with opened(NODES) as site:
        found: list[dict[str, Any]] = run_ranks(site, "benchmarks.checkpoint.peers_rank", NODES, plan, within_s, more)
        return found


def _step_s(jobs: list[list[dict[str, Any]]]) -> float:
    return statistics.median(statistics.fmean(ranks[0]["steps_s"]) for ranks in jobs)


def _ms(sorted_s: list[float], part: float) -> float | None:
    return round(1e3 * sorted_s[min(len(sorted_s) - 1, int(part * len(sorted_s)))], 2) if sorted_s else None


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "")[:500]
