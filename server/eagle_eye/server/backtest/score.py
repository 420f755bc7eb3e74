"""Scores verdicts against a trace's labels: precision, recall, localisation, delay, false exclusions.

A hit is an action of the expected kind on exactly the labelled nodes between onset and end + 60 s, one for each fault.
Any other exclusion or restart is false. Silence on a labelled fault is a miss, whatever its reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle_eye.server.backtest.run import VerdictLine
from eagle_eye.server.backtest.trace import Label

GRACE_S = 60.0  # after a fault's end, in which its verdict still counts
# Meanings of a label's "expect". "job": a finding about the job, without exclusion or restart.
EXPECTED_ACTIONS = {"exclude": ("exclude_node",), "restart": ("restart_job",), "job": ("notify",), "none": ()}
DISRUPTIVE = ("exclude_node", "restart_job")
DAY_S = 86_400.0


@dataclass(slots=True)
class ScoreCounts:
    """Counts over traces; for hits: ``delays_s`` from onset to verdict, ``action_delays_s`` to the action.

    A verdict may precede its action: one without a second kind of evidence yet, or that may still pass by itself, is
    reported first and acted on later.
    """

    labelled: int = 0
    hits: int = 0
    false: int = 0
    named: int = 0  # hits and false claims on a labelled fault whose nodes were exactly right
    claims: int = 0  # all claims within a labelled fault's time
    delays_s: list[float] = field(default_factory=list)
    action_delays_s: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the figures; None where the denominator is 0."""
        precision = _ratio(self.hits, self.hits + self.false)
        recall = _ratio(self.hits, self.labelled)
        return {
            "labelled": self.labelled,
            "hits": self.hits,
            "false": self.false,
            "precision": precision,
            "recall": recall,
            "f1": 2 * precision * recall / (precision + recall)
            if precision and recall
            else (0.0 if self.labelled else None),
            "localisation": _ratio(self.named, self.claims),
            "delay_p50_s": quantile(self.delays_s, 0.5),
            "delay_p95_s": quantile(self.delays_s, 0.95),
            "action_delay_p50_s": quantile(self.action_delays_s, 0.5),
            "action_delay_p95_s": quantile(self.action_delays_s, 0.95),
        }


@dataclass(slots=True)
class Scorecard:
    """The score over one or more traces, overall and for each fault."""

    overall: ScoreCounts = field(default_factory=ScoreCounts)
    faults: dict[str, ScoreCounts] = field(default_factory=dict)
    false_exclusions: int = 0
    node_days: float = 0.0

    def add(self, labels: Sequence[Label], lines: Sequence[VerdictLine], nodes: int, seconds: float) -> None:
        """Count one trace of ``nodes`` nodes observed for ``seconds``."""
        self.node_days += nodes * seconds / DAY_S
        used: set[int] = set()
        for label in labels:
            wanted = EXPECTED_ACTIONS.get(label.expect, ())
            if not wanted:
                continue
            within = [i for i, line in enumerate(lines) if label.start <= line.time <= label.end + GRACE_S]
            hit = next((i for i in within if i not in used and _is_hit(label, lines[i], wanted)), None)
            tallies = (self.overall, self.faults.setdefault(label.fault, ScoreCounts()))
            claimed = [i for i in within if lines[i].action in DISRUPTIVE]
            for tally in tallies:
                tally.labelled += 1
                tally.claims += len(claimed)
                tally.named += sum(sorted(lines[i].nodes) == sorted(label.nodes) for i in claimed)
                if hit is not None:
                    tally.hits += 1
                    tally.delays_s.append(_reported_s(lines, within, hit) - label.start)
                    tally.action_delays_s.append(lines[hit].time - label.start)
            if hit is not None:
                used.update(i for i in within if lines[i].id == lines[hit].id)
        for i, line in enumerate(lines):
            if i not in used and line.action in DISRUPTIVE:
                self.overall.false += 1
                self.faults.setdefault(line.fault, ScoreCounts()).false += 1
                self.false_exclusions += line.action == "exclude_node"

    def report(self) -> dict[str, Any]:
        """Return all figures as plain data."""
        thousand = self.node_days / 1000
        return {
            "overall": self.overall.summary(),
            "faults": {fault: tally.summary() for fault, tally in sorted(self.faults.items())},
            "false_exclusions": self.false_exclusions,
            "node_days": self.node_days,
            "false_exclusions_per_1000_node_days": _ratio(self.false_exclusions, thousand),
            "false_exclusions_per_1000_node_days_upper_95": _ratio(poisson_upper(self.false_exclusions), thousand),
        }


def _reported_s(lines: Sequence[VerdictLine], within: Sequence[int], hit: int) -> float:
    """Return when the hit's verdict was first raised on the same nodes."""
    same = [i for i in within if lines[i].id == lines[hit].id and sorted(lines[i].nodes) == sorted(lines[hit].nodes)]
    return min(lines[i].time for i in same)


def poisson_upper(count: int, confidence: float = 0.95) -> float:
    """Return the one-sided upper bound of a Poisson mean after seeing ``count`` events (Garwood 1936)."""
    low, high = float(count), count + 10 * math.sqrt(count + 1) + 10
    for _ in range(80):
        middle = (low + high) / 2
        seen_at_most = sum(math.exp(-middle + k * math.log(middle) - math.lgamma(k + 1)) for k in range(count + 1))
        low, high = (middle, high) if seen_at_most > 1 - confidence else (low, middle)
    return high


def _is_hit(label: Label, line: VerdictLine, wanted: Iterable[str]) -> bool:
    if line.action not in wanted:
        return False
    return line.action == "restart_job" or sorted(line.nodes) == sorted(label.nodes)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def quantile(values: Sequence[float], q: float) -> float | None:
    """Return the nearest-rank quantile, None if there are no values."""
    return sorted(values)[max(math.ceil(q * len(values)) - 1, 0)] if values else None
