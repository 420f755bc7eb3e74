"""Answers NVRx about failed cycles: our incidents in the terms of its attribution service. Pure, except for a lock.

NVRx's launcher names the cycle's log when it begins and again when it has failed, then polls until there is a verdict
(NVRx 0.7.0, shared_utils/health_check.py and attribution/orchestration/client_response.py). The log itself is never
read: it is on the cluster's storage, and the agents' observations are more informative.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from eagle_eye.server.model.records import Incident

LOGS_MAX = 2_048
VERDICT_WITHIN_S = 30.0  # after a failure: agents' frames, detectors and evidence take seconds
LEAD_S = 60.0  # an incident may begin before its cycle's log does
REPEAT_S = 3_600.0
REASON_CHARS_MAX = 500
MODULE = "eagle_eye"

Recommendation = Literal["STOP", "RESTART", "UNKNOWN"]


class Submitted(NamedTuple):
    """A submitted log: its job, since when its cycle runs, and when it failed (None: not known to have)."""

    job: str
    since_s: float
    failed_s: float | None = None


class Attribution(NamedTuple):
    """The answer about one cycle. ``final`` False: nothing found yet, with time left."""

    final: bool
    action: Recommendation
    reason: str
    incident_id: str = ""


class SubmittedLogs:
    """Maps logs to jobs; the oldest are forgotten beyond LOGS_MAX. From any thread."""

    def __init__(self) -> None:
        self._logs: dict[str, Submitted] = {}
        self._lock = threading.Lock()

    def submit(self, log_path: str, job: str, now_s: float, *, failed: bool) -> None:
        """Record the log; submitting it again changes only whether it has failed."""
        with self._lock:
            known = self._logs.pop(log_path, None) or Submitted(job, now_s)
            failed_s = known.failed_s if known.failed_s is not None or not failed else now_s
            self._logs[log_path] = Submitted(job or known.job, known.since_s, failed_s)
            if len(self._logs) > LOGS_MAX:
                del self._logs[next(iter(self._logs))]

    def get(self, log_path: str) -> Submitted | None:
        """Return what is known of the log, None if it was never submitted or is forgotten."""
        with self._lock:
            return self._logs.get(log_path)


def attribute(log: Submitted | None, incidents: Sequence[Incident], blind: str, now_s: float) -> Attribution:
    """Return the attribution of a cycle, from its job's incidents in any order.

    ``blind`` says why the server cannot detect faults, "" if it can. STOP is returned if the program itself failed in
    this cycle and in an earlier one within an hour: another restart would fail again. Without findings the result is
    UNKNOWN, never a reason to continue or to stop.
    """
    if log is None:
        return Attribution(True, "UNKNOWN", "this server has not received the log, or has dropped it")
    if not log.job:
        return Attribution(True, "UNKNOWN", "nobody said to which job the log belongs; put the job into the endpoint")
    known = [one for one in incidents if one.job == log.job and one.state != "false" and not one.merged_into]
    mine = [one for one in known if one.detected_s >= log.since_s - LEAD_S and one.action != "none"]
    if mine:
        return _of_incident(max(mine, key=_weight), known, log)
    if blind:
        return Attribution(True, "UNKNOWN", f"cannot tell: {blind}"[:REASON_CHARS_MAX])
    if log.failed_s is None or now_s < log.failed_s + VERDICT_WITHIN_S:
        return Attribution(False, "UNKNOWN", "nothing is found yet")
    return Attribution(True, "UNKNOWN", f"nothing was found within {VERDICT_WITHIN_S:g} s of the failure")


def body(log_path: str, attribution: Attribution) -> dict[str, Any]:
    """Return the attribution as GET /logs answers it."""
    return {
        "mode": "single",
        "log_file": log_path,
        "status": "completed" if attribution.final else "pending",
        "result": {
            "module": MODULE,
            "state": "complete" if attribution.final else "pending",
            "result": attribution.reason,
            "result_id": attribution.incident_id,
        },
        "recommendation": {"action": attribution.action, "reason": attribution.reason, "source": MODULE},
    }


def _of_incident(found: Incident, known: Sequence[Incident], log: Submitted) -> Attribution:
    nodes = ", ".join(found.nodes)
    blamed = f" on {nodes}" if nodes else ""
    before = [
        one for one in known if one.application and log.since_s - REPEAT_S <= one.detected_s < log.since_s - LEAD_S
    ]
    if found.application and before:
        text = (
            f"{found.fault}{blamed}: {found.summary}; the program itself has failed so before: a restart does not help"
        )
        return Attribution(True, "STOP", text[:REASON_CHARS_MAX], found.id)
    asked = f"; {found.action} is asked for" if found.action != "notify" else ""
    return Attribution(True, "RESTART", f"{found.fault}{blamed}: {found.summary}{asked}"[:REASON_CHARS_MAX], found.id)


def _weight(incident: Incident) -> tuple[bool, float, float]:
    """Sort key: causes that are acted on first, then the surest, then the newest."""
    return incident.action != "notify", incident.confidence, incident.detected_s
