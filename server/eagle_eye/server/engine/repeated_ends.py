"""Detects attempts that end repeatedly with the same exception: a program error that no restart fixes. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from eagle_eye.detectors.types import Evidence, Verdict
from eagle_eye.schema.action import EvidenceItem
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.model.records import Incident

FAULT = "application_error"
OF_AN_END = frozenset({"process_crash", FAULT})  # an incident that became another fault's was that fault's effect
EXCEPTION, STEP = "exception", "train_step"


def tells_of_an_exception(judgement: Judgement) -> bool:
    """Return whether most ranks of the job ended with one exception that only the program can have raised."""
    return any(_value(verdict.evidence, EXCEPTION) for verdict in judgement.verdicts if verdict.fault in OF_AN_END)


def with_repeated_ends(judgement: Judgement, earlier: Iterable[Incident], within_s: float) -> Judgement:
    """Return the judgement with a crash that repeats an earlier attempt's replaced by ``application_error``.

    ``earlier`` are the job's incidents, in any state; those of ``within_s`` count. The exception must be the same, and
    the step no later than then: if a job gets further between two such crashes, restarts help. No claim is made about
    an exception that a person has marked as not the program's.
    """
    known = [
        incident
        for incident in earlier
        if (incident.job, incident.fault in OF_AN_END) == (judgement.job, True)
        and judgement.now_s - incident.detected_s <= within_s
    ]
    verdicts = tuple(
        _application_error(verdict, judgement, known) if verdict.fault in OF_AN_END else verdict
        for verdict in judgement.verdicts
    )
    return dataclasses.replace(judgement, verdicts=verdicts)


def _application_error(verdict: Verdict, judgement: Judgement, known: Iterable[Incident]) -> Verdict:
    exception = _value(verdict.evidence, EXCEPTION)
    alike = [incident for incident in known if exception and _value(incident.evidence, EXCEPTION) == exception]
    if any(incident.fault == FAULT and incident.state == "false" for incident in alike):
        return verdict
    before = [i for i in alike if i.attempt != judgement.attempt and _step(verdict.evidence) <= _step(i.evidence)]
    if not before:
        return verdict
    step = _step(verdict.evidence)
    where = f"at step {step:.0f}" if step >= 0 else "before the first step"
    attempts = ", ".join(str(attempt) for attempt in sorted({i.attempt for i in before}))
    return dataclasses.replace(
        verdict,
        fault=FAULT,
        nodes=(),
        node=None,
        device=None,
        asks=None,
        application=True,
        kinds=verdict.kinds | {"repetition"},
        summary=f"{exception}, {where}, ended most ranks, as in attempt {attempts}: the program, and no restart helps",
    )


def _step(evidence: Iterable[Evidence | EvidenceItem]) -> float:
    """Return the last step finished before the end, -1 if there was none."""
    step = _value(evidence, STEP)
    return step if isinstance(step, float) and step == step else -1.0


def _value(evidence: Iterable[Evidence | EvidenceItem], metric: str) -> float | str | None:
    return next((item.value for item in evidence if item.metric == metric), None)
