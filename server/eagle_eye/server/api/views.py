"""Converts records to the API's JSON: times in RFC 3339, no secrets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from eagle_eye.server.delivery import events as outbound
from eagle_eye.server.delivery import outbox
from eagle_eye.server.engine.judgement import AttemptCheckpoints
from eagle_eye.server.engine.ledger import phase
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import rfc3339
from eagle_eye.server.model.event_filters import covering_incident, wants
from eagle_eye.server.model.records import (
    Action,
    AuditEntry,
    Delivery,
    EvidenceRequest,
    Incident,
    Job,
    NewsSilence,
    Node,
    NodeCheck,
    OutboundEvent,
    Subscription,
    SubscriptionHealth,
)
from eagle_eye.server.monitor.watcher import Outlook
from eagle_eye.server.store.store import SUBSCRIPTION_HEALTH, SUBSCRIPTIONS, Store


def plain(record: msgspec.Struct) -> dict[str, Any]:
    """Return a record's fields; ``detected_s`` becomes ``detected`` as RFC 3339, None stays None."""
    fields: dict[str, Any] = {}
    for name, value in msgspec.to_builtins(record).items():
        if name.endswith("_s"):
            fields[name.removesuffix("_s")] = None if value is None else rfc3339(value)
        else:
            fields[name] = value
    return fields


def incident(record: Incident) -> dict[str, Any]:
    """Return an incident; ``escalated`` is whether people have to look at it."""
    view = plain(record)
    for name in ("families", "held_by", "flap_times", "told_times", "untold"):
        del view[name]  # internal to the detection loop
    view["escalated"] = bool(record.escalation)
    return view


def action(record: Action, public_url: str) -> dict[str, Any]:
    """Return an action with its reports and report URL; the rules' results are shown with its incident.

    Of reports that claim nothing ``claim`` is "" and ``epoch`` 0.
    """
    view = plain(record)
    del view["policy"]
    view["report_to"] = outbound.report_url(public_url, record.id)
    view["reports"] = [
        {
            "claim": "",
            "epoch": 0,
            **{name: value for name, value in report.items() if name != "time_s"},
            "time": rfc3339(report["time_s"]),
        }
        for report in record.reports
    ]
    return view


def carriers(store: Store, record: Action, public_url: str, now_s: float) -> list[dict[str, Any]]:
    """Return the subscriptions that a request of the action goes to; [] means that nobody will carry it out."""
    request = outbound.action_requested(record, public_url, now_s)
    found = []
    for one in store.all(SUBSCRIPTIONS):
        if one.active and wants(one, request):
            health = store.get(SUBSCRIPTION_HEALTH, one.id)
            since_s = None if health is None else health.failing_since_s
            found.append(
                {
                    "subscription_id": one.id,
                    "url": one.url,
                    "failing_since": None if since_s is None else rfc3339(since_s),
                    "last_error": "" if health is None or since_s is None else health.last_error,
                }
            )
    return found


def evidence(record: EvidenceRequest) -> dict[str, Any]:
    """Return a request for evidence, with its bundle's URL; ``bundle`` is null if there is none."""
    view = plain(record)
    view["bundle"] = f"/api/v1/evidence/{record.id}/bundle" if record.state == "received" else None
    return view


def job(record: Job, outlook: Outlook, *, members: bool = True) -> dict[str, Any]:
    """Return a job with its progress; ``progress`` is null when no agent reports it.

    Without ``members`` only ``nodes_total`` has their number: a list of large jobs is large. It is null where neither a
    scheduler, a launcher nor an agent has named any.
    """
    view = plain(record if members else replace(record, ranks=[], nodes=[]))
    progress = outlook.progress(record.job)
    seen = () if progress is None else progress.nodes
    view["nodes_total"] = len(record.nodes or {rank.node for rank in record.ranks} or seen) or None
    view["progress"] = (
        None
        if progress is None
        else {
            "step": progress.step,
            "progressed": None if progress.progressed_s is None else rfc3339(progress.progressed_s),
            "step_seconds": progress.step_s,
            "memory_checkpoint": _memory_checkpoint(progress.checkpoints),
            "log": progress.log,
        }
    )
    return view


def _memory_checkpoint(reported: AttemptCheckpoints) -> dict[str, Any] | None:
    """Return the newest step that is complete in memory; None if no node reports one."""
    if reported.step is None:
        return None
    return {
        "step": reported.step,
        "age_steps": reported.at_risk_steps,
        "copies": reported.copies,
        "copies_wanted": reported.copies_wanted,
        "persisted_step": reported.persisted[-1][0] if reported.persisted else None,
    }


def node(record: Node, fleet: Fleet, offsets: dict[str, float], now_s: float) -> dict[str, Any]:
    """Return a node with its agent's latest report; ``agent`` is null without one since the server started.

    ``phase`` combines its standing with its progress on the way back. ``vouched``: a trusted source confirms that it
    exists, and it counts in the fleet's budgets.
    """
    view = plain(record)
    view["phase"] = phase(record, now_s)
    view["relapsed"] = [rfc3339(time_s) for time_s in record.relapsed]
    view["vouched"] = fleet.vouchers.vouch_for(record.node)
    heard, clock = fleet.last(record.node), fleet.clock_notes.said(record.node, now_s)
    dispute = fleet.claims.dispute(record.node, now_s)
    view["agent"] = (
        None
        if heard is None
        else {
            "heard": rfc3339(heard.received_s),
            "job": heard.job,
            "version": heard.agent_version,
            "boot_id": heard.boot_id,
            "interval_seconds": heard.interval_s,
            "clock_offset_seconds": offsets.get(record.node),
            "troubles": {
                **heard.troubles,
                **({} if clock is None else {"clock": clock}),
                **({} if dispute is None else {"identity": str(dispute)}),
            },
            "dropped": heard.dropped,
        }
    )
    return view


def node_check(record: NodeCheck) -> dict[str, Any]:
    """Return an active check with its report, without the agent's id of the run."""
    view = plain(record)
    del view["run"]
    return view


def delivery(record: Delivery) -> dict[str, Any]:
    """Return a delivery."""
    return plain(record)


def subscription(record: Subscription) -> dict[str, Any]:
    """Return a subscription without its secrets; ``retiring`` is when each replaced one ends."""
    view = plain(record)
    view["secrets"] = len(record.secrets) + len(record.retiring)
    view["retiring"] = [rfc3339(old.until_s) for old in record.retiring]
    return view


def subscription_health(record: SubscriptionHealth) -> dict[str, Any]:
    """Return the health of a subscription's deliveries."""
    view = plain(record)
    del view["subscription_id"]
    return view


def silence(record: NewsSilence, incidents: Iterable[Incident], now_s: float) -> dict[str, Any]:
    """Return a silence with the ids of those of the open incidents that it silences now."""
    if record.until_s <= now_s:
        return {**plain(record), "state": "ended", "incidents": []}
    return {
        **plain(record),
        "incidents": [one.id for one in incidents if covering_incident((record,), one) is not None],
    }


def silence_of(store: Store, record: Incident, now_s: float) -> dict[str, Any] | None:
    """Return the silence in force that covers the incident; None for none, and once the incident is over for good."""
    found = outbox.silence_of(store, record, now_s)
    return None if found is None else silence(found, (record,), now_s)


def audit(record: AuditEntry) -> dict[str, Any]:
    """Return an entry of the audit trail."""
    return plain(record)


def event(record: OutboundEvent, source: str) -> dict[str, Any]:
    """Return an event as subscribers get it."""
    return {
        "specversion": "1.0",
        "id": record.id,
        "source": source,
        "type": record.type,
        "subject": record.subject,
        "time": rfc3339(record.time_s),
        "datacontenttype": "application/json",
        "data": record.data,
    }
