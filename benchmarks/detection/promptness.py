"""Onset to verdict against what was asked for: a bound for each kind of fault, in intervals, steps and seconds.

Facts within two intervals and a second; a hang with a culprit within three of the job's steps and five seconds;
slowness of 10% within three steps or 15 s, the longer, where all sequences have one length; of 20% within 25 steps
where packed sequences make single steps noisy. Faults that creep have no moment to count from and are left out. The
interval is what the site's instruments are read at: exporters' is longer than an agent's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.detection import generate
from benchmarks.detection.plan import Case
from benchmarks.detection.score import Outcome
from eagle_eye.server.backtest.run import Scorecard, quantile

FACTS = frozenset({"gpu_lost", "gpu_memory_error", "process_crash", "out_of_memory"})
HANGS = frozenset({"hang", "gpu_hang", "network_hang"})
SLOW = frozenset(
    {"straggler", "thermal_throttle", "power_throttle", "pcie_degraded", "nic_degraded", "nvlink_degraded",
     "cpu_contention"}
)  # fmt: skip
SLOW_RATIO, SLOW_PACKED_RATIO = 0.10, 0.20


class Kind(NamedTuple):
    """One kind of fault: what is asked for, whether a trace is of it, and how many seconds it has."""

    asked: str
    includes: Callable[[Case, Outcome], bool]
    bound_s: Callable[[Case, Outcome], float]


KINDS = {
    "facts": Kind(
        "2 intervals + 1 s",
        lambda case, _: case.fault in FACTS,
        lambda case, outcome: 2 * generate.read_every_s(case, outcome.profile) + 1,
    ),
    "hang with culprit": Kind(
        "3 steps + 5 s",
        lambda case, outcome: case.fault in HANGS and bool(outcome.labels and outcome.labels[0].nodes),
        lambda case, _: 3 * case.step_s + 5,
    ),
    "slower by 10%, fixed length": Kind(
        "3 steps or 15 s",
        lambda case, outcome: case.fault in SLOW and not outcome.packed and outcome.slowdown >= SLOW_RATIO,
        lambda case, outcome: max(3 * case.step_s * (1 + outcome.slowdown), 15.0),
    ),
    "slower by 20%, packed": Kind(
        "25 steps",
        lambda case, outcome: case.fault in SLOW and outcome.packed and outcome.slowdown >= SLOW_PACKED_RATIO,
        lambda case, outcome: 25 * case.step_s * (1 + outcome.slowdown),
    ),
}


def promptness(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Return for each kind how many faults there were, were found and were reported in time, with the delays."""
    by_key = {case.key: case for case in cases}
    found: dict[str, dict[str, Any]] = {}
    for name, kind in KINDS.items():
        delays_s, late_s, labelled = [], [], 0
        for outcome in outcomes:
            case = by_key[outcome.key]
            if case.kind != "fault" or case.creeping or len(outcome.labels) != 1 or not kind.includes(case, outcome):
                continue
            card = Scorecard()
            card.add(outcome.labels, outcome.lines, outcome.nodes, outcome.seconds)
            labelled += card.overall.labelled
            delays_s += card.overall.delays_s
            late_s += [delay_s - kind.bound_s(case, outcome) for delay_s in card.overall.delays_s]
        found[name] = {
            "asked": kind.asked,
            "labelled": labelled,
            "found": len(delays_s),
            "in_time": sum(seconds <= 0 for seconds in late_s),
            "delay_p50_s": quantile(delays_s, 0.5),
            "delay_p95_s": quantile(delays_s, 0.95),
            "beyond_bound_p95_s": quantile(late_s, 0.95),
        }
    return found
