"""/api/v1/ledger/steps: fault by fault, whether what is on record suffices to let policy do more, and how to set it."""

from __future__ import annotations

from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Response

from eagle_eye.server.accounts import trust
from eagle_eye.server.accounts.archive import Archive
from eagle_eye.server.accounts.settings import AccountSettings
from eagle_eye.server.accounts.trust import FaultEvidence, HoursAtStake, ModeStep
from eagle_eye.server.api.accounts import LEDGER_S
from eagle_eye.server.api.requests import FaultName, Reader, Since, answer, moment_s, services
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.timestamps import rfc3339
from eagle_eye.server.monitor.watcher import Outlook

router = APIRouter(prefix="/api/v1", tags=["accounts"])


class Needs(Protocol):
    """The server's components that this module uses."""

    archive: Archive
    clock: Clock
    config: ServerConfig
    outlook: Outlook


@router.get("/ledger/steps")
def get_steps(
    parts: Annotated[Needs, Depends(services)], _: Reader, fault: FaultName = None, since: Since = None
) -> Response:
    """Each fault's mode, its decisions with their outcomes, whether they suffice for the next mode, and its lines.

    Of the last 90 days unless since is given. Each incident counts once.
    """
    since_s = parts.clock.now_s() - LEDGER_S if since is None else moment_s("since", since)
    settings, policy = parts.config.accounts, parts.outlook.policy()
    found, cut = parts.archive.decisions(since_s, fault)
    decisions = trust.of_incidents(found)
    spans = parts.archive.jobs() if decisions else None
    mine = trust.by_fault(decisions)
    items = []
    for name in trust.faults_of(decisions):
        if fault in (None, name):
            shown = trust.evidence(mine.get(name, []), spans.jobs if spans else {}, policy)
            items.append(_item(name, shown, trust.step(policy, name), settings))
    return answer(
        {
            "since": rfc3339(since_s),
            "window_seconds": parts.archive.hindsight_s,
            "decisions_min": settings.step_decisions_min,
            "approve_precision_min": settings.approve_precision_min,
            "act_precision_min": settings.act_precision_min,
            "cut": cut or (spans is not None and spans.cut),
            "items": items,
        }
    )


def _item(fault: str, shown: FaultEvidence, step: ModeStep, settings: AccountSettings) -> dict[str, Any]:
    counted = shown.precision
    verdict, detail = trust.assess(counted, step.mode, settings)
    return {
        "fault": fault,
        "mode": step.mode,
        "where": step.where,
        "kinds": step.kinds,
        "elsewhere": [
            {"where": where, "jobs": rule.jobs, "kinds": rule.kinds, "mode": rule.mode}
            for where, rule in step.elsewhere
        ],
        **counted._asdict(),
        "approved": shown.approved,
        "precision": counted.ratio,
        "interval_95": counted.interval,
        "saved": _hours(shown.saved),
        "cost": _hours(shown.cost),
        "next": step.next,
        "verdict": verdict,
        "detail": detail,
        "toml": step.toml,
        "in_place_of": step.in_place_of,
    }


def _hours(hours: HoursAtStake) -> dict[str, Any]:
    known_s = None if hours.gpu_seconds is None else round(hours.gpu_seconds, 3)
    return {"gpu_seconds": known_s, "cannot_tell": hours.cannot_tell}
