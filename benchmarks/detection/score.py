"""Two scores over the same outcomes: actions, as the trace format defines them, and nodes, which baselines can name.

Actions (the ``Scorecard`` of ``eagle-eye backtest``): Eagle Eye alone, for only it says what to do.

Nodes: every detector alike. A claim is (time, node), each node at most once a trace, for it would then be taken out. A
fault counts here when it has a node to name and is worth naming it (expected: exclude, or restart with a node). It is
a hit when every labelled node is claimed between onset and end + 60 s. Every claim that names no labelled node of
such a fault in its time is false: that includes claims while nothing is wrong, on faults of the job as a whole, and on
slowness that costs less than a restart (expected: none). Eagle Eye's claims are the nodes of its exclusions and the
nodes that its restarts blame.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from benchmarks.detection.baselines.protocol import Accusation, once_each
from eagle_eye.server.backtest.run import (
    DAY_S,
    DISRUPTIVE_ACTIONS,
    GRACE_S,
    Scorecard,
    ScoreCounts,
    VerdictLine,
    poisson_upper,
)
from eagle_eye.server.backtest.trace import Label

NAMEABLE = ("exclude", "restart")


class Outcome(msgspec.Struct, kw_only=True):
    """What everybody said about one trace in one profile, as one line of a file."""

    key: str
    profile: str
    kind: str
    fault: str
    nodes: int
    seconds: float
    labels: list[Label]
    lines: list[VerdictLine]
    accusations: dict[str, list[Accusation]]  # by baseline
    cost_s: dict[str, float]  # by detector, reading the trace included
    slowdown: float = 0.0  # by how much the fault makes steps longer; 0 where the job stops
    packed: bool = False  # whether the work differs from step to step


@dataclass(slots=True)
class NodeScore:
    """The node score of one detector over many traces."""

    overall: ScoreCounts = field(default_factory=ScoreCounts)
    faults: dict[str, ScoreCounts] = field(default_factory=dict)
    node_days: float = 0.0

    def add(self, labels: Sequence[Label], claims: Sequence[Accusation], nodes: int, seconds: float) -> None:
        """Count one trace of ``nodes`` nodes that were watched for ``seconds``."""
        self.node_days += nodes * seconds / DAY_S
        claims = once_each(claims)
        right: set[Accusation] = set()
        for label in labels:
            if not label.nodes or label.expect not in NAMEABLE:
                continue
            within = [c for c in claims if label.start <= c.time_s <= label.end + GRACE_S]
            named = {c.node: c for c in within if c.node in label.nodes}
            right.update(named.values())
            for tally in (self.overall, self.faults.setdefault(label.fault, ScoreCounts())):
                tally.labelled += 1
                tally.claims += len(within)
                tally.named += len(named)
                if len(named) == len(set(label.nodes)):
                    tally.hits += 1
                    tally.delays_s.append(max(c.time_s for c in named.values()) - label.start)
        self.overall.false += sum(claim not in right for claim in claims)

    def report(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        thousand = self.node_days / 1000
        return {
            **self.overall.summary(),
            "node_days": self.node_days,
            "false_per_1000_node_days": self.overall.false / thousand if thousand else None,
            "false_per_1000_node_days_upper_95": poisson_upper(self.overall.false) / thousand if thousand else None,
            "faults": {fault: tally.summary() for fault, tally in sorted(self.faults.items())},
        }


def claims_of(lines: Iterable[VerdictLine]) -> list[Accusation]:
    """Return the nodes that Eagle Eye would act on: those it excludes and those its restarts blame."""
    claims = []
    for line in lines:
        if line.action == "exclude_node":
            claims += [Accusation(line.time, node) for node in line.nodes]
        elif line.action in DISRUPTIVE_ACTIONS and line.node is not None:
            claims.append(Accusation(line.time, line.node))
    return once_each(claims)


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return all figures by profile: actions of Eagle Eye, nodes of everybody, and what the quiet traces brought."""
    result: dict[str, Any] = {}
    for profile in dict.fromkeys(outcome.profile for outcome in outcomes):
        chosen = [outcome for outcome in outcomes if outcome.profile == profile]
        result[profile] = {
            "traces": {kind: sum(o.kind == kind for o in chosen) for kind in ("fault", "healthy", "guilty")},
            "actions": _actions(chosen),
            "quiet": _actions([o for o in chosen if o.kind != "fault"]),
            "guilty": {
                name: _actions([o for o in chosen if o.kind == "guilty" and o.fault == name])["false_actions"]
                for name in sorted({o.fault for o in chosen if o.kind == "guilty"})
            },
            "nodes": _nodes(chosen),
            "nodes_on_quiet_traces": {
                name: {key: found[key] for key in ("false", "node_days", "false_per_1000_node_days_upper_95")}
                for name, found in _nodes([o for o in chosen if o.kind != "fault"]).items()
            },
            "cost_s": _costs(chosen),
        }
    return result


def _actions(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    card = Scorecard()
    for outcome in outcomes:
        card.add(outcome.labels, outcome.lines, outcome.nodes, outcome.seconds)
    report = card.report()
    return {
        **report,
        "false_restarts": card.overall.false - card.false_exclusions,
        "false_actions": card.overall.false,
    }


def _nodes(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    scores: dict[str, NodeScore] = {"Eagle Eye": NodeScore()}
    for outcome in outcomes:
        said = {"Eagle Eye": claims_of(outcome.lines), **outcome.accusations}
        for name, claims in said.items():
            scores.setdefault(name, NodeScore()).add(outcome.labels, claims, outcome.nodes, outcome.seconds)
    return {name: score.report() for name, score in scores.items()}


def _costs(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the mean seconds of computing a trace by detector."""
    total: dict[str, float] = {}
    for outcome in outcomes:
        for name, seconds in outcome.cost_s.items():
            total[name] = total.get(name, 0.0) + seconds
    return {name: round(seconds / len(outcomes), 3) for name, seconds in total.items()}
