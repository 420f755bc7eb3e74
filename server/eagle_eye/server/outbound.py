"""The events that leave the server: what each carries, and which subscriptions want it. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from eagle_eye.schema import action as schema
from eagle_eye.server.records import Action, Incident, Node, OutboundEvent, Subscription
from eagle_eye.server.timestamps import rfc3339

# Sent only to those who ask for it by name: everybody else would find little but heartbeats in his log.
_ON_REQUEST = frozenset({schema.HEARTBEAT})


def wants(subscription: Subscription, event: OutboundEvent) -> bool:
    """Return whether the event is delivered to the subscription.

    Empty ``types`` means all but heartbeats; empty ``jobs`` means all. Events of no job pass every job filter.
    A ping goes to the subscription that is its subject and to nobody else.
    """
    if event.type == schema.PING:
        return event.subject == subscription.id
    if subscription.types:
        if event.type not in subscription.types:
            return False
    elif event.type in _ON_REQUEST:
        return False
    return not subscription.jobs or not event.job or event.job in subscription.jobs


def report_url(public_url: str, action_id: str) -> str:
    """Return where a subscriber reports on an action."""
    return f"{public_url}/api/v1/actions/{action_id}/reports"


def incident_opened(incident: Incident, now_s: float) -> OutboundEvent:
    """Return the event that announces a new incident."""
    return _incident_event(schema.INCIDENT_OPENED, f"{incident.id}-opened", incident, now_s)


def incident_updated(incident: Incident, now_s: float) -> OutboundEvent:
    """Return the event that announces a change of an incident; one per ``updated_s``."""
    stamp = round(incident.updated_s * 1000)
    return _incident_event(schema.INCIDENT_UPDATED, f"{incident.id}-updated-{stamp}", incident, now_s)


def incident_resolved(incident: Incident, now_s: float) -> OutboundEvent:
    """Return the event that announces the end of an incident: recovered, closed or false."""
    return _incident_event(schema.INCIDENT_RESOLVED, f"{incident.id}-resolved-{incident.state}", incident, now_s)


def action_requested(action: Action, public_url: str, now_s: float) -> OutboundEvent:
    """Return the event that asks subscribers to carry the action out; void after the action's ``expires_s``."""
    return _action_event(schema.ACTION_REQUESTED, "requested", action, public_url, now_s, action.expires_s)


def action_expired(action: Action, public_url: str, now_s: float) -> OutboundEvent:
    """Return the event that says that nobody carried the action out in time."""
    return _action_event(schema.ACTION_EXPIRED, "expired", action, public_url, now_s, None)


def action_withdrawn(action: Action, public_url: str, now_s: float) -> OutboundEvent:
    """Return the event that takes a request back."""
    return _action_event(schema.ACTION_WITHDRAWN, "withdrawn", action, public_url, now_s, None)


def node_readmitted(node: Node, now_s: float) -> OutboundEvent:
    """Return the event that says that a node may be used again."""
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
    """Return an event that shows a subscriber that deliveries reach it; no data but the subscription's id."""
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
    """Return the sign of life of a server that can judge; stale as soon as the next one is due."""
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
    }


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
