"""The events that the server sends, their contents, and which subscriber may begin the action of one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from eagle_eye.schema import action as schema
from eagle_eye.schema.action import ActionClaim
from eagle_eye.server.model.clock import rfc3339
from eagle_eye.server.model.errors import IllegalTransition
from eagle_eye.server.model.records import Action, Incident, Node, OutboundEvent, Subscription


def claimed_action(action: Action, claim: ActionClaim, who: str, now_s: float) -> Action:
    """Return the action with the claim; the same object if its subscriber has it already.

    The epoch is kept with the claim and decides nothing: what a former leader asked for is in the records that the
    present one acts by. Raises IllegalTransition with why the action must not begin.
    """
    held = next((report["claim"] for report in action.reports if report.get("claim")), "")
    if action.state in ("accepted", "running") and held == claim.claim:
        return action
    if action.state not in ("requested", "accepted"):
        raise IllegalTransition(f"action {action.id} is {action.state}; it cannot be claimed any more")
    if held:
        raise IllegalTransition(f"action {action.id} is claimed by {held}; another subscriber must not begin it")
    entry = {
        "state": "accepted",
        "detail": claim.detail,
        "time_s": now_s,
        "who": who,
        "claim": claim.claim,
        "epoch": claim.epoch,
    }
    return replace(action, state="accepted", updated_s=now_s, reports=[*action.reports, entry])


_WAS = ("fault", "nodes", "state", "action", "escalated")  # incident fields whose earlier values an update repeats


def report_url(public_url: str, action_id: str) -> str:
    """Return the URL at which a subscriber reports on an action."""
    return f"{public_url}/api/v1/actions/{action_id}/reports"


def incident_opened(incident: Incident, now_s: float) -> OutboundEvent:
    """Return the event that announces a new incident, or one that has returned."""
    return _incident_event(schema.INCIDENT_OPENED, f"{incident.id}-opened{_time(incident)}", incident, now_s)


def incident_updated(incident: Incident, before: Incident, now_s: float) -> OutboundEvent:
    """Return the event that announces a changed incident; one per ``updated_s``. ``was`` has its earlier fields."""
    stamp = round(incident.updated_s * 1000)
    event = _incident_event(schema.INCIDENT_UPDATED, f"{incident.id}-updated-{stamp}", incident, now_s)
    former = incident_data(before)
    return msgspec.structs.replace(event, data={**event.data, "was": {name: former[name] for name in _WAS}})


def incident_unsilenced(incident: Incident, opening: bool, was: Mapping[str, Any], now_s: float) -> OutboundEvent:
    """Return the event that announces an incident as it is when a silence is over.

    ``opening``: its beginning was withheld; else ``was`` has those of its fields that were announced and have changed.
    """
    type_ = schema.INCIDENT_OPENED if opening else schema.INCIDENT_UPDATED
    event = _incident_event(type_, f"{incident.id}-unsilenced-{round(now_s * 1000)}", incident, now_s)
    if opening:
        return event
    now = {name: event.data[name] for name in _WAS}
    return msgspec.structs.replace(event, data={**event.data, "was": {**now, **was}})


def incident_resolved(incident: Incident, now_s: float) -> OutboundEvent:
    """Return the event that announces the end of an incident: recovered, closed or false."""
    name = f"{incident.id}-resolved-{incident.state}{_time(incident)}"
    return _incident_event(schema.INCIDENT_RESOLVED, name, incident, now_s)


def action_requested(action: Action, public_url: str, now_s: float) -> OutboundEvent:
    """Return the event that asks subscribers to perform the action; void after the action's ``expires_s``."""
    return _action_event(schema.ACTION_REQUESTED, "requested", action, public_url, now_s, action.expires_s)


def action_expired(action: Action, public_url: str, now_s: float) -> OutboundEvent:
    """Return the event that announces that the action was not performed in time."""
    return _action_event(schema.ACTION_EXPIRED, "expired", action, public_url, now_s, None)


def action_withdrawn(action: Action, public_url: str, now_s: float) -> OutboundEvent:
    """Return the event that withdraws a request for action; ``reason`` gives the reason."""
    event = _action_event(schema.ACTION_WITHDRAWN, "withdrawn", action, public_url, now_s, None)
    return msgspec.structs.replace(event, data={**event.data, "reason": action.reason})


def node_readmitted(node: Node, now_s: float) -> OutboundEvent:
    """Return the event that announces that a node may be used again."""
    return OutboundEvent(
        id=f"node-{node.node}-readmitted-{round(now_s * 1000)}",
        type=schema.NODE_READMITTED,
        subject=node.node,
        job="",
        time_s=now_s,
        group=f"node:{node.node}",
        data={"node": node.node, "state": node.state, "reason": node.reason, "readmitted": rfc3339(now_s)},
    )


def ping(subscription: Subscription, nonce: str, now_s: float) -> OutboundEvent:
    """Return an event that tests delivery to a subscriber; its data is only the subscription's id."""
    return OutboundEvent(
        id=f"ping-{nonce}",
        type=schema.PING,
        subject=subscription.id,
        job="",
        time_s=now_s,
        group="",
        data={"subscription_id": subscription.id},
    )


def heartbeat(now_s: float, interval_s: float, public_url: str) -> OutboundEvent:
    """Return the heartbeat of a server that can detect faults; stale as soon as the next one is due."""
    return OutboundEvent(
        id=f"heartbeat-{round(now_s * 1000)}",
        type=schema.HEARTBEAT,
        subject=public_url,
        job="",
        time_s=now_s,
        group="",
        data={"interval_seconds": interval_s},
        expires_s=now_s + interval_s,
    )


def request_data(action: Action, public_url: str) -> dict[str, Any]:
    """Return an action as the contract's ``data`` of ``eagle_eye.action.*`` events."""
    request = schema.ActionRequest(
        action_id=action.id,
        kind=action.kind,
        job=action.job,
        attempt=action.attempt,
        exclude=action.exclude,
        restart=action.restart,
        fault=action.fault,
        confidence=action.confidence,
        onset=rfc3339(action.onset_s),
        detected=rfc3339(action.detected_s),
        expires=rfc3339(action.expires_s),
        incident_id=action.incident_id,
        repair=action.repair,
        summary=action.summary,
        evidence=action.evidence,
        ranks=action.ranks,
        report_to=report_url(public_url, action.id),
        resume_from=action.resume_from,
        restart_scope=action.restart_scope,
    )
    plain = msgspec.to_builtins(request)
    assert isinstance(plain, dict)  # noqa: S101 - a Struct becomes a dict
    return plain


def incident_data(incident: Incident) -> dict[str, Any]:
    """Return an incident as the ``data`` of ``eagle_eye.incident.*`` events; times are RFC 3339."""
    return {
        "incident_id": incident.id,
        "job": incident.job,
        "attempt": incident.attempt,
        "fault": incident.fault,
        "state": incident.state,
        "nodes": incident.nodes,
        "node": incident.node,
        "device": incident.device,
        "confidence": incident.confidence,
        "onset": rfc3339(incident.onset_s),
        "detected": rfc3339(incident.detected_s),
        "updated": rfc3339(incident.updated_s),
        "ended": None if incident.ended_s is None else rfc3339(incident.ended_s),
        "action": incident.action,
        "hold": incident.hold,
        "hold_rule": incident.hold_rule,
        "detectors": incident.detectors,
        "summary": incident.summary,
        "evidence": msgspec.to_builtins(incident.evidence),
        "acknowledged_by": incident.acknowledged_by,
        "escalated": bool(incident.escalation),
        "escalation": incident.escalation,
        "flaps": incident.flaps,
        "flapping": incident.flapping,
        "merged": incident.merged,
        "merged_into": incident.merged_into,
        "split_from": incident.split_from,
    }


def _time(incident: Incident) -> str:
    """Return the suffix that distinguishes the events of an incident's returns; "" the first time."""
    return f"-{incident.flaps}" if incident.flaps else ""


def _incident_event(type_: str, id_: str, incident: Incident, now_s: float) -> OutboundEvent:
    return OutboundEvent(
        id=id_,
        type=type_,
        subject=incident.id,
        job=incident.job,
        time_s=now_s,
        group=incident.id,
        data=incident_data(incident),
    )


def _action_event(
    type_: str, word: str, action: Action, public_url: str, now_s: float, expires_s: float | None
) -> OutboundEvent:
    return OutboundEvent(
        id=f"{action.id}-{word}",
        type=type_,
        subject=action.id,
        job=action.job,
        time_s=now_s,
        group=action.incident_id,
        data=request_data(action, public_url),
        expires_s=expires_s,
    )
