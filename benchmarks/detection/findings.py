"""What was missed and what was wrong, trace by trace, for those who mend detectors: the score says only how often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.detection.plan import Case
from benchmarks.detection.score import Outcome
from eagle_eye.server.backtest.run import DISRUPTIVE_ACTIONS, Scorecard, VerdictLine
from eagle_eye.server.backtest.trace import Label
from eagle_eye.simulator.second_physics import drawn

SAID_MAX = 3  # verdicts that are shown of a fault that was missed


def findings(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> dict[str, list[dict[str, Any]]]:
    """Return ``missed`` and ``wrong``, an entry for each label that was not met and each action that was false."""
    by_key = {case.key: case for case in cases}
    missed, wrong = [], []
    for outcome in outcomes:
        case = by_key[outcome.key]
        trace = {
            "profile": outcome.profile,
            "seed": case.seed,
            "fault": case.fault,
            "beside": case.background,
            "nodes": case.nodes,
            "gpus": case.gpus,
            "minutes": case.minutes,
            "step_s": case.step_s,
            "interval_s": case.interval_s,
            "strength": case.strength,
            "creeping": case.creeping,
            "physics": _traits(case),
        }
        for label in outcome.labels:
            if _score([label], outcome.lines, outcome).overall.hits < _score([label], [], outcome).overall.labelled:
                slowdown = round(outcome.slowdown, 3)
                missed.append({**trace, "slowdown": slowdown, "expect": label.expect, "said": _said(label, outcome)})
        wrong += [{**trace, **_reported(line, outcome.labels)} for line in _false(outcome)]
    return {"missed": missed, "wrong": wrong}


def _traits(case: Case) -> dict[str, Any]:
    """Return what of the trace's physics bears on what could be seen of it."""
    if case.physics == "own":
        return {}
    physics = drawn(case.seed)
    return {
        "waits": "spinning" if physics.waits_spin else "idle",
        "tails": physics.tails,
        "noise_scale": round(physics.noise_scale, 1),
        "uneven_experts": physics.uneven_experts,
        "spare_nodes": physics.spare_nodes,
        "xids": 0 if physics.xid_silent else physics.xid_repeats,
        "symptoms_missing": physics.symptoms_missing,
        "victims_share": physics.victims_share,
        "refresh_rows": physics.refresh_rows,
        "absent": sorted(physics.absent),
    }


def _score(labels: Sequence[Label], lines: Sequence[VerdictLine], outcome: Outcome) -> Scorecard:
    card = Scorecard()
    card.add(labels, lines, outcome.nodes, outcome.seconds)
    return card


def _false(outcome: Outcome) -> list[VerdictLine]:
    """Return the actions without which the score has fewer false ones."""
    false = _score(outcome.labels, outcome.lines, outcome).overall.false
    lines = outcome.lines
    return [
        line
        for number, line in enumerate(lines)
        if line.action in DISRUPTIVE_ACTIONS
        and _score(outcome.labels, lines[:number] + lines[number + 1 :], outcome).overall.false < false
    ]


def _said(label: Label, outcome: Outcome) -> list[dict[str, Any]]:
    reported: dict[tuple[str, str], dict[str, Any]] = {}
    for line in outcome.lines:
        if line.time >= label.start:
            reported.setdefault((line.fault, line.action), _reported(line, [label]))
    return list(reported.values())[:SAID_MAX]


def _reported(line: VerdictLine, labels: Sequence[Label]) -> dict[str, Any]:
    """Return a verdict in few words; ``right_nodes`` None where no label names a node."""
    named = [label for label in labels if label.nodes]
    started = [label.start for label in labels if label.start <= line.time]
    return {
        "said": line.fault,
        "action": line.action,
        "after_s": round(line.time - max(started), 1) if started else None,
        "right_nodes": any(sorted(line.nodes) == sorted(label.nodes) for label in named) if named else None,
        "confidence": round(line.confidence, 2),
        "summary": line.summary[:200],
    }
