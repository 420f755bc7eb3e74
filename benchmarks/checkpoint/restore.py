"""How soon the state is back: out of own memory, out of a neighbour's, and from storage, each rank with as many bytes.

Two nodes with a rank each. ``own`` restarts both ranks where they were. For ``neighbour`` the second rank's node is
lost with its memory and a new one takes its place. ``storage`` is torch.distributed.checkpoint's own load of the same
state out of files on this machine's disk that are not in the page cache, ``share`` the same out of the page cache, no
faster than a rank's share of a shared file system.
"""

from __future__ import annotations

import statistics
from typing import Any

import msgspec

from benchmarks.checkpoint.machine import load_average
from benchmarks.checkpoint.site import opened, run_ranks

NODES = ["n1", "n2"]
ARMS = ("own", "neighbour", "storage", "share")
START_S = 300.0
SLOWEST_BYTES_PER_S = 50e6
OWN_ASKED, NEIGHBOUR_ASKED = 0.6, 0.6  # of memcpy, of TCP over loopback


class RestorePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks do: ``rounds`` times each arm, of ``rank_bytes`` a rank in ``tensors`` tensors."""

    rank_bytes: int
    tensors: int
    rounds: int
    share_bytes_per_s: float
    seed: int


def measure(plan: RestorePlan) -> dict[str, Any]:
    """Return the throughputs, and how many times sooner memory is than storage."""
    within_s = START_S + plan.rounds * len(ARMS) * (10 + 2 * plan.rank_bytes / SLOWEST_BYTES_PER_S)
    before = load_average()
    with opened(NODES) as site:
        ranks = run_ranks(site, "benchmarks.checkpoint.restore_rank", NODES, plan, within_s)
    return {**figures(ranks, plan), "load_average": {"before": before, "after": load_average()}}


def figures(ranks: list[dict[str, Any]], plan: RestorePlan) -> dict[str, Any]:
    """Return the figures of what the ranks have found. The slower rank counts; of the lost node only its own."""
    times = {arm: ranks[1]["load_s"][arm] if arm == "neighbour" else _slower(ranks, "load_s", arm) for arm in ARMS}
    memcpy = _rate(plan, [max(both) for both in zip(*(rank["memcpy_s"] for rank in ranks), strict=True)])
    tcp = _rate(plan, ranks[1]["tcp_s"])
    rates = {arm: _rate(plan, found) for arm, found in times.items()}
    medians = {arm: statistics.median(found) for arm, found in times.items()}
    return {
        "rank_bytes": plan.rank_bytes,
        "rounds": plan.rounds,
        "load_s": {arm: _figures(found) for arm, found in times.items()},
        "restore_s": {arm: _figures(_slower(ranks, "restore_s", arm)) for arm in ("own", "neighbour")},
        "gb_per_s": {**rates, "memcpy": memcpy, "tcp_loopback": tcp},
        "own_of_memcpy": _of(rates["own"], memcpy),
        "neighbour_of_tcp": _of(rates["neighbour"], tcp),
        "times_sooner": {
            arm: {slow: round(medians[slow] / medians[arm], 1) for slow in ("storage", "share")}
            for arm in ("own", "neighbour")
        },
        "right": all(rank["right"] for rank in ranks),
    }


def _slower(ranks: list[dict[str, Any]], what: str, arm: str) -> list[float]:
    """Return the slower rank's time in each round."""
    return [max(both) for both in zip(*(rank[what][arm] for rank in ranks), strict=True)]


def _rate(plan: RestorePlan, seconds: list[float]) -> dict[str, float]:
    return {
        "median": round(plan.rank_bytes / statistics.median(seconds) / 1e9, 2),
        "best": round(plan.rank_bytes / min(seconds) / 1e9, 2),
    }


def _of(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    return {name: round(ours[name] / theirs[name], 3) for name in ("median", "best")}


def _figures(seconds: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds), 3), "least": round(min(seconds), 3)}
