"""Describes what would be done, without changing anything."""

from __future__ import annotations

from eagle_eye.orchestrators.errors import CannotCarryOutError
from eagle_eye.orchestrators.protocol import Checkpoints, Exclusion, Orchestrator, Previews
from eagle_eye.orchestrators.verbs import Verb, verbs
from eagle_eye.schema.action import ActionRequest


def would(orchestrator: Orchestrator, action: ActionRequest) -> str:
    """Return the report of a dry run, which begins with "dry run:"."""
    if action.kind == "checkpoint_now" and isinstance(orchestrator, Checkpoints):
        return "dry run: would wait for a step that is kept whole"
    if action.kind == "checkpoint_now":
        return f"dry run: would fail: {orchestrator.name} cannot make the job write a checkpoint"
    asked = verbs(action)
    if not asked:
        return "dry run: would note it and change nothing"
    try:
        return "dry run: would " + "; then ".join(_in_words(orchestrator, action.job, verb) for verb in asked)
    except CannotCarryOutError as error:
        return f"dry run: would fail: {error}"


def _in_words(orchestrator: Orchestrator, job: str, verb: Verb) -> str:
    if isinstance(orchestrator, Previews):
        return orchestrator.preview(verb)
    if isinstance(verb, Exclusion):
        return f"exclude {', '.join(verb.nodes)} from job {job}" + ("" if verb.now else " at its next restart")
    without = f" without {', '.join(verb.without)}" if verb.without else ""
    return f"restart job {job}, now at attempt {verb.over_attempt},{without}".rstrip(",")
