"""Closes incidents for good: those that recovered and did not return, and those no longer evaluated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from msgspec.structs import replace

from eagle_eye.server.delivery import events as outbound
from eagle_eye.server.engine.ended import FORGET_JOB_S
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import AuditEntry, Incident
from eagle_eye.server.monitor.judgement_changes import WHO
from eagle_eye.server.store.store import Change, Store

BATCH = 500  # incidents closed in one transaction


def closed(
    store: Store,
    policy: PolicySettings,
    judged: Collection[str],
    now_s: float,
    concerns: Callable[[str], bool] = lambda _: True,
) -> Change:
    """Return the change that closes them, the oldest first, at most ``BATCH``; ``judged`` are the jobs still evaluated.

    Incidents of jobs that this server does not judge (``concerns``) are another's.

    An incident whose job has not been heard of for as long as the engine remembers jobs is not known to have recovered:
    it is closed anyway, and announced, since nothing else will ever end it.
    """
    mine = [one for one in store.open_incidents() if concerns(one.job)]
    found = list(_over(mine, policy, judged, now_s))[:BATCH]
    after = {incident.id: _ended(incident, now_s) for incident, _ in found}
    return Change(
        incidents=tuple(after.values()),
        events=tuple(outbound.incident_resolved(after[i.id], now_s) for i, _ in found if i.ended_s is None),
        audit=tuple(AuditEntry(time_s=now_s, who=WHO, verb="close", subject=i.id, detail=why) for i, why in found),
    )


def _over(
    incidents: list[Incident], policy: PolicySettings, judged: Collection[str], now_s: float
) -> Iterator[tuple[Incident, str]]:
    for incident in incidents:
        if incident.state == "recovered":
            if incident.ended_s is None or now_s - incident.ended_s > policy.reopen_s:
                yield incident, f"it did not come back within {policy.reopen_s:.0f} s (policy.reopen_s)"
        elif incident.job not in judged and now_s - max(incident.seen_s, incident.updated_s) > FORGET_JOB_S:
            yield incident, f"nothing was heard of job {incident.job} for {FORGET_JOB_S / 3600:.0f} hours"


def _ended(incident: Incident, now_s: float) -> Incident:
    ended_s = now_s if incident.ended_s is None else incident.ended_s
    return replace(incident, state="closed", updated_s=now_s, ended_s=ended_s, flapping=False)
