"""Scores verdicts against a trace's labels: precision, recall, localisation, delay, false exclusions.

A hit is an action of the expected kind on exactly the labelled nodes between onset and end + 60 s, one for each fault;
whether it also has the fault's name is counted beside it. Any other exclusion or restart is false. Silence on a
labelled fault is a miss, whatever its reason.

A drain or notice is wrong where it accuses a node of which no label of that time speaks, where it tells of a job
that nothing is wrong with, and, for a drain, where the label expects the node to stay.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle_eye.server.backtest.run import VerdictLine
from eagle_eye.server.backtest.trace import Label
from eagle_eye.server.backtest.trace_format import EXPECTED_ACTIONS

GRACE_S = 60.0  # after a fault's end, in which its verdict still counts
DISRUPTIVE = ("exclude_node", "restart_job")
DAY_S = 86_400.0


@dataclass(slots=True)
class ScoreCounts:
    """Counts over traces; for hits: ``delays_s`` from onset to verdict, ``action_delays_s`` to the action.

    A verdict may precede its action: one without a second kind of evidence yet, or that may still pass by itself, is
    reported first and acted on later. Wrong drains and notices are counted once for each verdict and set of nodes.
    """

    labelled: int = 0
    hits: int = 0
    false: int = 0
    wrong_drains: int = 0
    wrong_notices: int = 0
    named: int = 0  # hits and false claims on a labelled fault whose nodes were exactly right
    claims: int = 0  # all claims within a labelled fault's time
    other_names: Counter[str] = field(default_factory=Counter)  # names of faults that hits gave and labels did not
    delays_s: list[float] = field(default_factory=list)
    action_delays_s: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the figures; None where the denominator is 0. ``precision`` is that of exclusions and restarts."""
        precision = _ratio(self.hits, self.hits + self.false)
        recall = _ratio(self.hits, self.labelled)
        return {
            "labelled": self.labelled,
            "hits": self.hits,
            "other_name": self.other_names.total(),
            "other_names": dict(self.other_names.most_common()),
            "false": self.false,
            "wrong_drains": self.wrong_drains,
            "wrong_notices": self.wrong_notices,
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
            wanted = EXPECTED_ACTIONS[label.expect]
            if wanted is None:
                continue
            within = [i for i, line in enumerate(lines) if _in_time(label, line)]
            hit = next((i for i in within if i not in used and _is_hit(label, lines[i], wanted)), None)
            claimed = [i for i in within if lines[i].action in DISRUPTIVE]
            for tally in (self.overall, self._of(label.fault)):
                tally.labelled += 1
                tally.claims += len(claimed)
                tally.named += sum(sorted(lines[i].nodes) == sorted(label.nodes) for i in claimed)
                if hit is not None:
                    tally.hits += 1
                    tally.delays_s.append(_reported_s(lines, within, hit) - label.start)
                    tally.action_delays_s.append(lines[hit].time - label.start)
                    if lines[hit].fault != label.fault:
                        tally.other_names[lines[hit].fault] += 1
            if hit is not None:
                used.update(i for i in within if lines[i].id == lines[hit].id)
        false = [line for i, line in enumerate(lines) if i not in used and line.action in DISRUPTIVE]
        for line in false:
            for tally in (self.overall, self._of(line.fault)):
                tally.false += 1
            self.false_exclusions += line.action == "exclude_node"
        self._count_wrong_words(labels, lines, {_claim(line) for line in false})

    def _count_wrong_words(
        self, labels: Sequence[Label], lines: Sequence[VerdictLine], counted: set[tuple[str, ...]]
    ) -> None:
        """Count wrong drains, then wrong notices: of one claim the gravest. Adds to ``counted``, the claims so far.

        A claim is judged by when it was first made: what was right then may be repeated after the fault's end.
        """
        first: dict[tuple[str, ...], VerdictLine] = {}
        for line in lines:
            first.setdefault(_claim(line), line)
        for action in ("drain_node", "notify"):
            for line in lines:
                claim = _claim(line)
                if line.action != action or claim in counted or _is_founded(labels, first[claim], action):
                    continue
                counted.add(claim)
                for tally in (self.overall, self._of(line.fault)):
                    if action == "drain_node":
                        tally.wrong_drains += 1
                    else:
                        tally.wrong_notices += 1

    def _of(self, fault: str) -> ScoreCounts:
        return self.faults.setdefault(fault, ScoreCounts())

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


def _in_time(label: Label, line: VerdictLine) -> bool:
    return label.start <= line.time <= label.end + GRACE_S


def _is_hit(label: Label, line: VerdictLine, wanted: str) -> bool:
    if line.action != wanted:
        return False
    return line.action == "restart_job" or sorted(line.nodes) == sorted(label.nodes)


def _claim(line: VerdictLine) -> tuple[str, ...]:
    """Return what the line claims: a verdict on these nodes, whatever fault and action it gives them."""
    return (line.id, *sorted(line.nodes))


def _is_founded(labels: Sequence[Label], line: VerdictLine, action: str) -> bool:
    """Return whether labels of the line's time account for it: each of its nodes or, without any, a fault of the job.

    A drain also needs each node to be expected to leave, at once or later.
    """
    current = [label for label in labels if _in_time(label, line)]
    if action == "drain_node":
        current = [label for label in current if label.expect in ("exclude", "drain")]
    return bool(current) and {node for label in current for node in label.nodes}.issuperset(line.nodes)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def quantile(values: Sequence[float], q: float) -> float | None:
    """Return the nearest-rank quantile, None if there are no values."""
    return sorted(values)[max(math.ceil(q * len(values)) - 1, 0)] if values else None
