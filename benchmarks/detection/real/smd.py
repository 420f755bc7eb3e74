"""Server Machine Dataset: how well detectors of a machine's own history find what operators labelled.

NetManAIOps/OmniAnomaly via zhhlee/InterFusion (MIT): machines 1-6, 2-7 and 3-3, a sample a minute, 38 unnamed
metrics. The machines are not synchronous, so there is no peer logic. Fitted on train only, threshold included, by the
same rule for every detector: the lowest that raises no more than a given number of alarms a day on the newest 30% of
train, unseen. Two such numbers are reported, none and one a day. Average precision over the samples, event-F1 and false
alarms a machine-day; no point adjustment, with which a random score reaches 0.82.

    python -m benchmarks.detection.real.smd --data FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from sklearn.metrics import average_precision_score

from benchmarks.detection.real.expected_metrics import ExpectedMetrics
from benchmarks.detection.real.own_history import (
    EventScore,
    NearestNeighbour,
    OwnHistory,
    PcaEwma,
    event_score,
    own_thresholds,
)
from benchmarks.detection.real.sets import Figures, main

NEEDS = "real/smd_subset"
MACHINES = ("machine-1-6", "machine-2-7", "machine-3-3")
LINES_PER_DAY = 1440.0
BUDGETS = {"no alarm on unseen train": 0.0, "one alarm a day on unseen train": 1.0}
DETECTORS: tuple[Callable[[], OwnHistory], ...] = (NearestNeighbour, PcaEwma, ExpectedMetrics)


def measure(folder: Path) -> Figures:
    """Return each detector's figures over all machines and for each."""
    return {detector().name: _over_machines(detector, folder) for detector in DETECTORS}


def _over_machines(detector: Callable[[], OwnHistory], folder: Path) -> Figures:
    machines: Figures = {}
    totals = dict.fromkeys(BUDGETS, EventScore(0, 0, 0, 0))
    precisions, days = [], 0.0
    for machine in MACHINES:
        data = np.load(folder / f"{machine}.npz")
        train, test, labels = data["train"], data["test"], data["label"].astype(bool)
        model = detector()
        thresholds = own_thresholds(model, train, list(BUDGETS.values()), LINES_PER_DAY)
        scores = model.score(test)
        precision = float(average_precision_score(labels, scores))
        machines[machine] = {"average_precision": round(precision, 3)}
        for (budget, total), threshold in zip(totals.items(), thresholds, strict=True):
            events = event_score(scores > threshold, labels)
            machines[machine][budget] = _figures(events, len(test) / LINES_PER_DAY)
            totals[budget] = total + events
        precisions.append(precision)
        days += len(test) / LINES_PER_DAY
    overall = {budget: _figures(total, days) for budget, total in totals.items()}
    return {"average_precision": round(float(np.mean(precisions)), 3), **overall, "machines": machines}


def _figures(events: EventScore, days: float) -> Figures:
    return {
        "events": events.events,
        "events_found": events.found,
        "alarms": events.alarms,
        "event_f1": round(events.f1, 3),
        "false_alarms_a_machine_day": round(events.false / days, 3),
    }


if __name__ == "__main__":
    sys.exit(main(measure, NEEDS, __doc__))
