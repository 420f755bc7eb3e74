"""What approving an action would do and cost, as the API shows it; and the action that asks once more. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec.structs import replace

from eagle_eye.server.api.policy_view import NOT_JUDGED
from eagle_eye.server.engine.policy import Weighing
from eagle_eye.server.model.errors import IllegalTransition
from eagle_eye.server.model.records import Action, Incident, RuleWord
from eagle_eye.server.model.timestamps import rfc3339
from eagle_eye.server.monitor.watcher import JobProgress

OPEN_STATES = ("suspected", "confirmed", "acting")
NO_HOLD = ("tries", "mode")  # rules whose hold a person's wish to be asked again answers
HEARD_MAX = 32  # nodes whose latest report is named


class _Budget(NamedTuple):
    """Whose budget of what a policy rule keeps, and under which names it gives what is used and the limit."""

    what: str
    of: str
    used: str
    limit: str


_BUDGETS: Mapping[str, _Budget] = MappingProxyType(
    {
        "job_exclusions": _Budget("exclusions", "job", "excluded", "exclusions_per_job"),
        "fleet_exclusions": _Budget("exclusions", "fleet", "excluded", "limit"),
        "job_restarts": _Budget("restarts", "job", "restarts", "restarts_per_job"),
        "fleet_restarts": _Budget("restarts", "fleet", "restarts", "restarts_fleet"),
    }
)


def preview(
    action: Action,
    weighing: Weighing | None,
    course: JobProgress | None,
    heard_s: Mapping[str, float],
    carriers: Sequence[Mapping[str, Any]],
    now_s: float,
) -> dict[str, Any]:
    """Return whom the action affects, what its budgets have left after it, how fresh the data is, and who hears of it.

    ``course`` is the job's progress, None if nobody reports it; ``heard_s`` is when each node was last heard;
    ``carriers`` are as ``views.carriers`` returns them. GPUs are null where no rank of theirs is known.
    """
    gpus = {(rank.node, rank.device) for rank in action.ranks}
    of_nodes = sum(node in action.exclude for node, _ in gpus)
    return {
        "action_id": action.id,
        "time": rfc3339(now_s),
        "nodes": action.exclude,
        "gpus": of_nodes or None,
        "job": action.job,
        "restart": action.restart,
        "job_nodes": len({node for node, _ in gpus}) or None,
        "job_gpus": len(gpus) or None,
        "confidence": action.confidence,
        "budgets": _budgets(action, weighing),
        "heard": [
            {"node": node, "heard": None if (time_s := heard_s.get(node)) is None else rfc3339(time_s)}
            for node in action.exclude[:HEARD_MAX]
        ],
        "job_nodes_heard": None if course is None else course.heard,
        "job_nodes_known": None if course is None else len(course.nodes),
        "progressed": None if course is None or course.progressed_s is None else rfc3339(course.progressed_s),
        "carriers": carriers,
        "hold_now": other_hold(weighing, action),
    }


def other_hold(weighing: Weighing | None, action: Action) -> str:
    """Return why policy would hold the action now, apart from its mode and from having asked for it itself.

    "": it would not, or no longer judges.
    """
    if weighing is None:
        return ""
    held = (word for word in weighing.words if word.outcome == "hold" and word.rule not in NO_HOLD)
    return next((word.reason for word in held if word.values.get("action") != action.id), "")


def asked_again(old: Action, incident: Incident, weighing: Weighing | None, now_s: float, lasts_s: float) -> Action:
    """Return an action, without an id, that asks a person for the same as ``old``, which expired.

    Raises IllegalTransition unless policy would ask for the same now, were it not for the try that expired.
    """
    if old.state != "expired":
        raise IllegalTransition(f"action {old.id} is {old.state}; only one that has expired can be asked for again")
    if incident.state not in OPEN_STATES:
        raise IllegalTransition(f"incident {incident.id} is {incident.state}: there is nothing to ask for any more")
    if weighing is None or incident.attempt != old.attempt:
        raise IllegalTransition(f"action {old.id} cannot be asked for again: {NOT_JUDGED}")
    holding = next((w for w in weighing.words if w.outcome == "hold" and w.rule not in NO_HOLD), None)
    if holding is not None:
        raise IllegalTransition(f"policy holds it now ({holding.rule}): {holding.reason}")
    decision = weighing.decision
    if decision.mode == "observe":
        raise IllegalTransition("policy only observes here now (policy.mode, policy.modes): nothing can be asked for")
    wanted = (decision.kind, decision.exclude, decision.restart)
    if wanted != (old.kind, tuple(old.exclude), old.restart):
        raise IllegalTransition(
            f"policy would ask for something else now: {decision.kind} {', '.join(decision.exclude)}".rstrip()
        )
    return replace(
        old,
        id="",
        state="awaiting",
        confidence=incident.confidence,
        summary="; ".join((incident.summary, *decision.notes)),
        evidence=incident.evidence,
        created_s=now_s,
        updated_s=now_s,
        expires_s=now_s + lasts_s,
        reports=[],
        reason="",
        policy=[word for word in weighing.words if word.outcome != "not_applicable"],
        resume_from=None,  # the steps in memory have moved on
    )


def _budgets(action: Action, weighing: Weighing | None) -> list[dict[str, Any]]:
    """Return each budget that the action draws on, with what is left of it once the action is done."""
    now = _weighed(weighing.words) if weighing is not None else {}
    then = _weighed(action.policy)
    found = []
    for rule, budget in _BUDGETS.items():
        values = now.get(rule) or then.get(rule)
        if not values:
            continue
        # What awaits approval is counted already, but was not yet when it was weighed itself.
        own = 0 if rule in now else 1 if budget.what == "restarts" else len(action.exclude)
        used, limit = values.get(budget.used), values.get(budget.limit)
        if isinstance(used, int | float) and isinstance(limit, int | float):
            window_s = values.get("window_s")
            found.append(
                {
                    "what": budget.what,
                    "of": budget.of,
                    "left": max(0, int(limit) - int(used) - own),
                    "limit": int(limit),
                    "window_seconds": window_s if isinstance(window_s, int | float) else None,
                }
            )
    return found


def _weighed(words: Iterable[RuleWord]) -> dict[str, Mapping[str, float | str | None]]:
    return {word.rule: word.values for word in words if word.outcome != "not_applicable"}
