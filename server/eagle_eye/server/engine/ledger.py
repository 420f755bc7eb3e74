"""State transitions of incidents, actions and nodes by people and subscribers: pure functions of records.

Every function returns the new record, or the same object if the change was made before: verbs are idempotent.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec.structs import replace

from eagle_eye.schema.action import Report
from eagle_eye.server.engine.check_suites import related
from eagle_eye.server.engine.standing import BY_HAND, SERVER, fault_of, is_ours, is_watched
from eagle_eye.server.model.errors import IllegalTransition
from eagle_eye.server.model.records import Action, ActionState, Incident, Node, NodeState

REPORTS_MAX = 100  # of one action; a subscriber that reports in a loop must not grow the record without limit
REPORT_CHARS_MAX = 4_096
RELAPSES_MAX = 32  # remembered per node

# Reports that a subscriber may make, by state.
_REPORTABLE = MappingProxyType(
    {
        "requested": ("accepted", "running", "done", "failed", "refused"),
        "accepted": ("running", "done", "failed", "refused"),
        "running": ("done", "failed"),
        # It started before it learned of the withdrawal; the outcome must still be recorded.
        "withdrawn": ("accepted", "running", "done", "failed", "refused"),
    }
)
_OVER = ("closed", "false")
_STANDS: Mapping[NodeState, str] = MappingProxyType(
    {"in_service": "readmitted", "excluded": "excluded", "draining": "drained"}
)


def report_action(action: Action, report: Report, who: str, now_s: float) -> Action:
    """Return the action with a subscriber's report added; earlier reports are kept.

    A repeated state changes nothing unless its detail is new, which is kept too. Terminal states stay. Raises
    IllegalTransition.
    """
    detail = report.detail[:REPORT_CHARS_MAX]
    if report.state == action.state and any(
        reported.get("state") == report.state and reported.get("detail") == detail for reported in action.reports
    ):
        return action
    if report.state != action.state and report.state not in _REPORTABLE.get(action.state, ()):
        allowed = ", ".join(_REPORTABLE.get(action.state, ())) or "nothing more"
        raise IllegalTransition(
            f"action {action.id} is {action.state}; {report.state} cannot be reported on it, only {allowed}"
        )
    if len(action.reports) >= REPORTS_MAX and report.state == action.state:
        raise IllegalTransition(f"action {action.id} has {REPORTS_MAX} reports, which is the most it may have")
    entry = {"state": report.state, "detail": detail, "time_s": now_s, "who": who}
    return replace(action, state=report.state, updated_s=now_s, reports=[*action.reports, entry])


def approve(action: Action, now_s: float) -> Action:
    """Return the action as requested, approved by a person; unchanged if a subscriber has accepted it since.

    Raises IllegalTransition unless it awaits approval and has not expired.
    """
    if action.state in ("requested", "accepted", "running", "done"):
        return action
    if action.state == "awaiting" and action.expires_s <= now_s:
        raise IllegalTransition(f"action {action.id} is past its expiry and can no longer be approved")
    return _moved(action, "requested", ("awaiting",), now_s)


def reject(action: Action, now_s: float) -> Action:
    """Return the action as rejected by a person. Raises IllegalTransition unless it awaits approval."""
    return _moved(action, "rejected", ("awaiting",), now_s)


def withdraw(action: Action, reason: str, now_s: float) -> Action:
    """Return the action as withdrawn. Raises IllegalTransition once a subscriber has accepted it."""
    taken = _moved(action, "withdrawn", ("awaiting", "requested"), now_s)
    return taken if taken is action else replace(taken, reason=reason)


def expire(action: Action, now_s: float) -> Action:
    """Return the action as expired. Raises IllegalTransition once a subscriber has accepted it."""
    return _moved(action, "expired", ("awaiting", "requested"), now_s)


def acknowledge(incident: Incident, who: str, now_s: float) -> Incident:
    """Return the incident with the name of the person who has seen it; the first name stays."""
    if incident.acknowledged_by:
        return incident
    return replace(incident, acknowledged_by=who, updated_s=now_s)


def resolve(incident: Incident, now_s: float) -> Incident:
    """Return the incident as closed by a person. Raises IllegalTransition for one marked false."""
    if incident.state == "closed":
        return incident
    if incident.state == "false":
        raise IllegalTransition(f"incident {incident.id} is marked false and stays so")
    return replace(incident, state="closed", updated_s=now_s, ended_s=incident.ended_s or now_s)


def mark_false(incident: Incident, now_s: float) -> Incident:
    """Return the incident as marked a false alarm by a person; also one that is over."""
    if incident.state == "false":
        return incident
    return replace(incident, state="false", updated_s=now_s, ended_s=incident.ended_s or now_s)


def is_over(incident: Incident) -> bool:
    """Return whether the incident needs no further action."""
    return incident.state in _OVER


def stand(node: Node, state: NodeState, reason: str, now_s: float, by: str = "") -> Node:
    """Return the node in its new state, as set by ``by``; the same object if it is already in that state.

    A node that is already out and gets another reason belongs to whoever gave it: pending steps of its return are void,
    and our actions no longer touch it.
    """
    if node.state == state and (state == "in_service" or reason in ("", node.reason)):
        return replace(node, check_id="", updated_s=now_s) if node.check_id else node  # it is to stay out
    out = node.state != "in_service" and state != "in_service"
    return replace(
        node,
        state=state,
        reason=reason or f"{_STANDS[state]} by {by}",
        updated_s=now_s,
        by=by,
        fault=fault_of(node) if out else "",
        check_id="",
        watched_until_s=None,
    )


def take_out(node: Node, fault: str, reason: str, state: NodeState, now_s: float) -> Node:
    """Return the node as taken out by one of our actions; a node taken out by somebody else is unchanged.

    That it is a suspect of silent corruption is recorded anyway, until it has returned.
    """
    out = node.state != "in_service"
    suspected = next(iter(BY_HAND & {fault, fault_of(node) if out else ""}), fault)
    if out and (not is_ours(node) or node.state in ("excluded", state)):
        news = suspected in BY_HAND and node.fault != suspected
        return replace(node, fault=suspected, check_id="") if news else node
    relapsed = node.relapsed
    if is_watched(node, now_s) and related(node.fault, fault):
        relapsed = [*relapsed, now_s][-RELAPSES_MAX:]
    return replace(
        node,
        state=state,
        reason=reason,
        updated_s=now_s,
        by=SERVER,
        fault=suspected,
        check_id="",
        watched_until_s=None,
        relapsed=relapsed,
    )


def readmit(node: Node, reason: str, by: str, now_s: float, watch_s: float) -> Node:
    """Return the node in service, watched for ``watch_s`` for the fault that took it out, if one did."""
    if node.state == "in_service":
        return node
    fault = fault_of(node)
    back = stand(node, "in_service", reason, now_s, by)
    return replace(back, fault=fault, watched_until_s=now_s + watch_s) if fault and watch_s > 0 else back


def _moved(action: Action, state: ActionState, sources: tuple[ActionState, ...], now_s: float) -> Action:
    if action.state == state:
        return action
    if action.state not in sources:
        raise IllegalTransition(f"action {action.id} is {action.state}; only {' or '.join(sources)} can become {state}")
    return replace(action, state=state, updated_s=now_s)
