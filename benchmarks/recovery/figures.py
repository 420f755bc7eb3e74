"""What a run shows, reckoned from its outcomes. Pure."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from benchmarks.recovery.outcome import Outcome, stale_done
from benchmarks.recovery.spent import Spent

ENDED_WELL = ("recovered", "undisturbed")


class Session(msgspec.Struct, kw_only=True):
    """One uninterrupted part of a run: how long, and how far the job got, under fire and before.

    ``starts`` are the starts of a node's ranks, by where they came from; ``spent`` is where the time under fire went.
    """

    calm_s: float
    calm_steps: int
    fire_s: float = 0.0
    fire_steps: int = 0  # the job's last step less the one it began at: what was done again counts once
    returned: int = 0
    forced: int = 0
    refused: dict[str, int] = {}
    starts: dict[str, int] = {}
    spent: Spent = msgspec.field(default_factory=Spent)


def starts(reported: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return how often a node's ranks came from a standby, went on or were spawned, by what the launcher said."""
    runs = [line for line in reported if line["event"] == "running"]
    standbys, kept = sum(len(line["standbys"]) for line in runs), sum(len(line.get("kept", ())) for line in runs)
    spawned = sum(len(line["nodes"]) for line in runs) - standbys - kept
    return {"standby": standbys, "kept": kept, "spawned": spawned}


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the value that so large a share does not exceed (nearest rank); None without values, or endless."""
    if not values:
        return None
    found = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    return round(found, 2) if math.isfinite(found) else None


def times(outcomes: Iterable[Outcome], *, from_last: bool = False) -> dict[str, Any]:
    """Return how long it took from the first fault, or the last, to the first new step; for ever where aborted."""
    took = [
        one.since_last_harm_s if from_last else one.first_step_s
        for one in outcomes
        if one.result not in ("undisturbed", "disturbed")
    ]
    waited = [math.inf if seconds is None else seconds for seconds in took]
    finite = [value for value in waited if math.isfinite(value)]
    return {
        "runs": len(waited),
        "aborted": len(waited) - len(finite),
        "p50_s": percentile(waited, 0.5),
        "p95_s": percentile(waited, 0.95),
        "max_s": round(max(finite), 2) if finite else None,
    }


def figures(outcomes: Sequence[Outcome], sessions: Sequence[Session]) -> dict[str, Any]:
    """Return the report; every aborted item counts as what it is."""
    harms = [one for outcome in outcomes for one in outcome.harms if one.kind != "flapping"]
    overtaken = sum(len(outcome.overtaken) for outcome in outcomes)
    missed = [f"item {o.number}: {one.kind} on {one.node}" for o in outcomes for one in o.missed]
    named = sum(len(outcome.named) for outcome in outcomes)
    wrong = [f"item {outcome.number}: {node}" for outcome in outcomes for node in outcome.wrong]
    calm_s, calm_steps = sum(s.calm_s for s in sessions), sum(s.calm_steps for s in sessions)
    fire_s, fire_steps = sum(s.fire_s for s in sessions), sum(s.fire_steps for s in sessions)
    pace = calm_steps / calm_s if calm_s else 0.0
    return {
        "items": len(outcomes),
        "faults": len(harms),
        "results": dict(collections.Counter(outcome.result for outcome in outcomes)),
        "right_node": {
            "named": named,
            "ended_by_the_restart_for_another": overtaken,
            "missed": missed,
            "rate": round(named / (named + len(missed)), 3) if named + len(missed) else None,
        },
        "healthy_nodes_excluded": wrong,
        "restarts": sum(outcome.restarts for outcome in outcomes),
        "restarts_double": [f"item {o.number}: {o.restarts_double}" for o in outcomes if o.restarts_double],
        "stale_actions_done": stale_done(outcomes),
        "alarms_by_hand": dict(collections.Counter(f"{o.shape} {o.alarm}" for o in outcomes if o.alarm)),
        "steps_lost": {
            "all": sum(outcome.steps_lost for outcome in outcomes),
            "p50": percentile([o.steps_lost for o in outcomes if o.restarts], 0.5),
            "p95": percentile([o.steps_lost for o in outcomes if o.restarts], 0.95),
        },
        "first_step": {
            "all": times(outcomes),
            "by_kind": _grouped(outcomes, lambda one: one.harms[0].kind if one.shape == "single" and one.harms else ""),
            "by_shape": _grouped(outcomes, lambda one: one.shape),
            "from_the_second_fault": times((one for one in outcomes if len(one.harms) > 1), from_last=True),
            "by_scope": _grouped(outcomes, lambda one: one.scopes[0] if _is_one_restart(one) else ""),
        },
        "steps_per_hour": {
            "undisturbed": round(3600 * pace),
            "under_fire": round(3600 * fire_steps / fire_s) if fire_s else None,
        },
        "effective_training_ratio": round(fire_steps / fire_s / pace, 3) if fire_s and pace else None,
        "time_spent": functools.reduce(Spent.and_also, (s.spent for s in sessions), Spent()).shares,
        "starts": dict(sum((collections.Counter(s.starts) for s in sessions), collections.Counter())),
        "nodes": {
            "came_back": sum(s.returned for s in sessions),
            "of_them_forced": sum(s.forced for s in sessions),
            "refused": dict(sum((collections.Counter(s.refused) for s in sessions), collections.Counter())),
        },
    }


def passed(found: dict[str, Any]) -> bool:
    """Return whether nothing happened that must never happen, and nobody had to help."""
    never = ("healthy_nodes_excluded", "restarts_double", "stale_actions_done")
    return not any(found[name] for name in never) and not set(found["results"]) - set(ENDED_WELL)


def _is_one_restart(one: Outcome) -> bool:
    return one.shape == "single" and len(one.scopes) == 1


def _grouped(outcomes: Sequence[Outcome], key: Callable[[Outcome], str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Outcome]] = {}
    for one in outcomes:
        if key(one):
            groups.setdefault(key(one), []).append(one)
    return {name: found for name, own in sorted(groups.items()) if (found := times(own))["runs"]}
