"""Policy's decision on an incident, as the API shows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from eagle_eye.server.engine.policy import Decision, Weighing
from eagle_eye.server.model.records import Action, Incident
from eagle_eye.server.model.timestamps import rfc3339

NOT_JUDGED = "its attempt of the job is not judged any more: what the rules would say of it now is not known"


def policy_view(incident: Incident, weighing: Weighing | None, actions: Iterable[Action]) -> dict[str, Any]:
    """Return the decision and every rule's result in order, and the results when actions were requested.

    ``decision`` is null, with the reason in ``detail``, if the incident is no longer evaluated; ``hold`` and
    ``hold_rule`` are those of the incident's record. Names of values include their units.
    """
    return {
        "incident_id": incident.id,
        "job": incident.job,
        "fault": incident.fault,
        "state": incident.state,
        "hold": incident.hold,
        "hold_rule": incident.hold_rule,
        "detail": "" if weighing else NOT_JUDGED,
        "decision": _decision(weighing.decision) if weighing else None,
        "rules": msgspec.to_builtins(weighing.words) if weighing else [],
        "asked": [
            {
                "action_id": action.id,
                "created": rfc3339(action.created_s),
                "kind": action.kind,
                "state": action.state,
                "rules": msgspec.to_builtins(action.policy),
            }
            for action in actions
        ],
    }


def _decision(decision: Decision) -> dict[str, Any]:
    return {
        "kind": decision.kind,
        "exclude": list(decision.exclude),
        "restart": decision.restart,
        "mode": decision.mode,
        "first": decision.first,
        "hold": decision.hold,
        "rule": decision.rule,
        "notes": list(decision.notes),
    }
