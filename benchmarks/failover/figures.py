"""What takeovers cost, reckoned from their outcomes. Pure."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from benchmarks.failover.plan import SAME_LEADER
from benchmarks.recovery.figures import percentile

ASKED = {"acted_p95_s": 20.0, "hand_over_max_s": 3.0}
NONE = (
    "actions_lost",
    "actions_carried_out_twice",
    "actions_of_a_former_leader_carried_out",
    "actions_for_nothing",
    "incidents_opened_twice",
    "actions_asked_for_twice",
    "acknowledged_rows_missing",
    "takeovers_that_did_not_come",
)


class Outcome(msgspec.Struct, kw_only=True):
    """What came of one event. Seconds are from the event on, where all were away from their return on (``plan.AWAY``).

    None: not within the patience of the run.

    ``led_s`` until another server led, ``taken_s`` until the subscriber had the webhook about the fault, ``acted_s``
    until the restart was carried out, ``whole_s`` until the leader had all rows of the nodes.
    """

    number: int
    kind: str
    fault_after_s: float
    led_s: float | None = None
    taken_s: float | None = None
    acted_s: float | None = None
    whole_s: float | None = None
    found_as: str = ""
    rows: int = 0
    rows_missing: int = 0
    unsettled: int = 0
    twice: int = 0
    for_nothing: int = 0
    opened_twice: int = 0  # incidents of the fault in whoever leads's records, but one
    asked_twice: int = 0  # likewise actions
    of_a_former_leader: int = 0
    refused_for_their_epoch: int = 0
    dropped: dict[str, int] = {}  # by agents, since they began
    load_average: float = 0.0


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the report."""
    kinds = sorted({one.kind for one in outcomes})
    return {
        "takeovers": len(outcomes),
        "actions_lost": sum(one.acted_s is None or one.unsettled > 0 for one in outcomes),
        "actions_carried_out_twice": sum(one.twice for one in outcomes),
        "actions_of_a_former_leader_carried_out": sum(one.of_a_former_leader for one in outcomes),
        "actions_for_nothing": sum(one.for_nothing for one in outcomes),
        "incidents_opened_twice": sum(one.opened_twice for one in outcomes),
        "actions_asked_for_twice": sum(one.asked_twice for one in outcomes),
        "acknowledged_rows": sum(one.rows for one in outcomes),
        "acknowledged_rows_missing": sum(one.rows_missing for one in outcomes),
        "takeovers_that_did_not_come": sum(one.led_s is None and one.kind not in SAME_LEADER for one in outcomes),
        "webhooks_refused_for_their_epoch": sum(one.refused_for_their_epoch for one in outcomes),
        "found_as": dict(collections.Counter(one.found_as for one in outcomes if one.found_as)),
        "load_average": percentile([one.load_average for one in outcomes], 0.5),
        "acted": quantiles(one.acted_s for one in outcomes),
        "hand_over": quantiles(one.led_s for one in outcomes if one.kind == "handed_over"),
        "by_kind": {kind: _of_kind([one for one in outcomes if one.kind == kind]) for kind in kinds},
    }


def _of_kind(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    led = (one.led_s for one in outcomes if one.kind not in SAME_LEADER)
    return {
        "takeovers": len(outcomes),
        "another_leads": quantiles(led),
        "webhook_taken": quantiles(one.taken_s for one in outcomes),
        "acted": quantiles(one.acted_s for one in outcomes),
        "rows_whole": quantiles(one.whole_s for one in outcomes),
    }


def quantiles(values: Iterable[float | None]) -> dict[str, float | None]:
    """Return median, 95th percentile (values that occurred) and maximum; None for what did not come to an end."""
    waited = [math.inf if value is None else value for value in values]
    return {name: percentile(waited, share) for name, share in (("p50_s", 0.5), ("p95_s", 0.95), ("max_s", 1.0))}


def missed(found: dict[str, Any], lease_s: float) -> list[str]:
    """Return what was asked and is not so. Times are asked of a lease of 5 s and shorter ones."""
    wrong = [f"{name} is {found[name]}, asked 0" for name in NONE if found[name]]
    times = {"acted_p95_s": found["acted"]["p95_s"]}
    if "handed_over" in found["by_kind"]:
        times["hand_over_max_s"] = found["hand_over"]["max_s"]
    if lease_s <= 5.0:
        wrong += [
            f"{name} is {'for ever' if took is None else f'{took:g}'}, asked {ASKED[name]:g}"
            for name, took in times.items()
            if took is None or took > ASKED[name]
        ]
    return wrong
