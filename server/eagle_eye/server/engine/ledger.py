"""State transitions of incidents, actions and nodes by people and subscribers: pure functions of records.

A node that was taken out returns once the checks that test for its fault have passed, or by hand, on probation.

Every function returns the new record, or the same object if the change was made before: verbs are idempotent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from msgspec.structs import replace

from eagle_eye.detectors.faults import BY_NAME
from eagle_eye.schema.action import Report
from eagle_eye.server.engine.settings import PolicySettings, moment
from eagle_eye.server.model.errors import IllegalTransition
from eagle_eye.server.model.records import Action, ActionState, CheckOutcome, Incident, Node, NodeState


@dataclass(frozen=True, slots=True)
class Probation:
    """How often a node was recently excluded, and until when to keep it out; None: it may return at once.

    ``relapses`` counts the exclusions that came while it was still watched after an earlier return.
    """

    exclusions: int
    until_s: float | None
    relapses: int = 0


def probation(
    node: str, actions: Iterable[Action], settings: PolicySettings, now_s: float, relapsed: Iterable[float] = ()
) -> Probation:
    """Return what a node that is out needs to come back.

    ``actions`` are any; those count that took the node out within ``flapping_window_s``. The first exclusion needs
    nothing, the second ``probation_s`` from when it was done, each further one twice as much, up to
    ``probation_s_max``. A relapse (``relapsed`` are their times) counts as one more exclusion, since the repair did not
    hold. A person's exclusions do not count: they are deliberate.
    """
    done_s = [
        action.updated_s
        for action in actions
        if action.kind == "exclude_node"
        and action.state == "done"
        and node in action.exclude
        and now_s - action.updated_s <= settings.flapping_window_s
    ]
    relapses = sum(now_s - time_s <= settings.flapping_window_s for time_s in relapsed)
    times = len(done_s) + relapses
    if not done_s or times < 2 or settings.probation_s <= 0:
        return Probation(len(done_s), None, relapses)
    doublings = min(times - 2, 32)  # beyond this the limit applies anyway
    until_s = max(done_s) + min(settings.probation_s * 2.0**doublings, settings.probation_s_max)
    return Probation(len(done_s), until_s if until_s > now_s else None, relapses)


# Shown to people: the standing, and the node's progress on its way back.
Phase = Literal["in_service", "watched", "draining", "excluded", "checking"]
Way = Literal["return", "check", "refuse"]

SERVER = "server"  # the author of our own actions
BY_HAND = frozenset({"silent_data_corruption"})  # no check clears a node of it


@dataclass(frozen=True, slots=True)
class Offer:
    """Whether the node's agent makes checks: it offers them, used to but cannot now (``why``), or never did."""

    state: Literal["ready", "unable", "none"]
    why: str = ""


@dataclass(frozen=True, slots=True)
class ReturnRequest:
    """How a return is requested. ``who`` asks; ``check``: by a check, whatever the settings; ``force``: at once."""

    who: str
    reason: str = ""
    check: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True)
class ReturnRequirement:
    """What a return needs: nothing, a passed check, or it is refused.

    ``word`` and ``detail`` give the reason of a refusal; of a return ``detail`` says why no check goes before it.
    """

    way: Way
    word: str = ""
    detail: str = ""


def phase(node: Node, now_s: float) -> Phase:
    """Return the node's phase."""
    if node.state == "in_service":
        return "watched" if is_watched(node, now_s) else "in_service"
    return "checking" if node.check_id else node.state


def is_watched(node: Node, now_s: float) -> bool:
    """Return whether the node has returned so recently that a fault of the same family counts as a relapse."""
    return node.state == "in_service" and node.watched_until_s is not None and now_s < node.watched_until_s


def fault_of(node: Node) -> str:
    """Return the fault that took the node out, "" if none of ours did. Old records have it only in their reason."""
    if node.fault or node.by:
        return node.fault
    named = node.reason.partition(":")[0]
    return named if named in BY_NAME else ""


def is_ours(node: Node) -> bool:
    """Return whether one of our actions set the node's standing, and nothing has changed it or its reason since."""
    return node.by == SERVER or (not node.by and bool(fault_of(node)))


def returning(
    node: Node, asking: ReturnRequest, offer: Offer, actions: Iterable[Action], settings: PolicySettings, now_s: float
) -> ReturnRequirement:
    """Return what a node that is out needs to come back; of ``actions``, those that took it out count."""
    fault = fault_of(node)
    if asking.force:
        if fault in BY_HAND and not asking.reason:
            return ReturnRequirement(
                "refuse", "reason", f"{node.node} is a suspect of {fault}: say why it may return (reason)"
            )
        return ReturnRequirement("return", detail=f"forced by {asking.who}")
    if fault in BY_HAND:
        detail = (
            f"{node.node} is a suspect of {fault}, which no check rules out: it returns by hand alone,"
            " with force=true and a reason; have its GPUs replaced or tested for hours first"
        )
        return ReturnRequirement("refuse", "by_hand", detail)
    if node.by and node.by not in (SERVER, asking.who):
        detail = (
            f"{node.node} is {node.state} by {node.by} ({node.reason or 'no reason given'}), not by Eagle Eye or you:"
            " ask there, or readmit it with force=true"
        )
        return ReturnRequirement("refuse", "not_ours", detail)
    found = probation(node.node, actions, settings, now_s, node.relapsed)
    if found.until_s is not None:
        relapses = f", and {found.relapses} times while it was still watched" if found.relapses else ""
        detail = (
            f"{node.node} was excluded {found.exclusions} times lately{relapses}, and is on probation until"
            f" {moment(found.until_s)} (policy.probation_s); wait, or readmit it with force=true"
        )
        return ReturnRequirement("refuse", "probation", detail)
    return _checked(node, asking, offer, settings)


def _checked(node: Node, asking: ReturnRequest, offer: Offer, settings: PolicySettings) -> ReturnRequirement:
    required = asking.check or settings.readmit_check == "required"
    if not required and settings.readmit_check == "off":
        return ReturnRequirement("return", detail="policy.readmit_check is off")
    # A node taken out by a person may be put back by that person, unless a check is requested.
    if not required and not fault_of(node):
        return ReturnRequirement("return", detail=f"{node.by or 'a person'} had taken it out by hand")
    if not required and offer.state == "none":
        return ReturnRequirement("return", detail=offer.why)
    if offer.state == "ready":
        return ReturnRequirement("check")
    detail = f"{node.node} cannot be checked: {offer.why}; mend that, or readmit it with force=true"
    return ReturnRequirement("refuse", "cannot_check", detail)


LONG_GEMM_S = 60.0  # heat and power limits show after a minute under load, not after eight seconds
BRIEF_S = 150.0
SDC_STARTS_S = 120.0  # to load torch twice, open the GPUs, and compute the results
WHOLE_S = 300.0  # everything, with the site's own tools

# Faults of one part of the node; two of one family may share a cause. A fault without a family may be in any part.
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "gpu_lost": "gpu",
        "gpu_memory_error": "gpu",
        "gpu_hang": "gpu",
        "silent_data_corruption": "gpu",
        "thermal_throttle": "gpu",
        "power_throttle": "gpu",
        "pcie_degraded": "gpu",
        "nvlink_degraded": "gpu",
        "network_hang": "network",
        "nic_degraded": "network",
    }
)


class Suite(NamedTuple):
    """What ``eagle-eye check`` must run; ``checks`` empty: all of its checks.

    At least one check of each group in ``proof`` must have passed: without them a report may call the node healthy
    although it did not test for this fault, for lack of a tool or the hardware. ``gemm_s`` 0: the check's default;
    ``sdc_s`` likewise.
    """

    checks: tuple[str, ...]
    proof: tuple[tuple[str, ...], ...]
    deadline_s: float
    gemm_s: float = 0.0
    sdc_s: float = 0.0


EVERYTHING = Suite((), (), WHOLE_S)
_GPU = ("gemm", "memory", "gpu_facts", "dcgm")
_SEEN = ("gpu_facts",)  # the driver sees GPUs at all: otherwise they were not under load

_SUITES: Mapping[str, Suite] = MappingProxyType(
    {
        "gpu_lost": Suite(_GPU, (_SEEN, ("gemm", "dcgm")), WHOLE_S),
        "gpu_hang": Suite(_GPU, (_SEEN, ("gemm", "dcgm")), WHOLE_S),
        "gpu_memory_error": Suite(_GPU, (_SEEN, ("memory", "dcgm")), WHOLE_S),
        "silent_data_corruption": Suite(_GPU, (_SEEN, ("gemm",), ("memory",)), WHOLE_S, LONG_GEMM_S),
        "thermal_throttle": Suite(("gemm", "gpu_facts"), (_SEEN, ("gemm",)), BRIEF_S, LONG_GEMM_S),
        "power_throttle": Suite(("gemm", "gpu_facts"), (_SEEN, ("gemm",)), BRIEF_S, LONG_GEMM_S),
        "pcie_degraded": Suite(("gemm", "gpu_facts"), (_SEEN, ("gemm",)), BRIEF_S),
        "nvlink_degraded": Suite(
            ("gpu_facts", "nccl_tests", "all_reduce"), (_SEEN, ("nccl_tests", "all_reduce")), BRIEF_S
        ),
        "network_hang": Suite(("ib_write_bw",), (("ib_write_bw",),), BRIEF_S),
        "nic_degraded": Suite(("ib_write_bw",), (("ib_write_bw",),), BRIEF_S),
        "storage_stall": Suite(("disk",), (("disk",),), BRIEF_S),
    }
)


def suite(fault: str, sdc_s: float = 0.0) -> Suite:
    """Return the suite that tests for the fault; everything for a fault without a specific check, and for "".

    With ``sdc_s`` it is the search for silent corruption on a node that is not suspected of anything.
    """
    if sdc_s > 0:
        return Suite(("sdc_gemm", "sdc_all_reduce"), (("sdc_gemm",),), sdc_s + SDC_STARTS_S, sdc_s=sdc_s)
    return _SUITES.get(fault, EVERYTHING)


def unproven(fault: str, outcomes: Iterable[CheckOutcome], sdc_s: float = 0.0) -> str:
    """Return why passed checks do not clear the node of the fault, "" if they do."""
    passed = {outcome.name for outcome in outcomes if outcome.state == "passed"}
    missing = [group for group in suite(fault, sdc_s).proof if not passed & set(group)]
    if not missing:
        return ""
    wanted = ", ".join(" or ".join(group) for group in missing)
    return f"what has passed says nothing of {fault}: {wanted} must have passed (eagle-eye check --list says its needs)"


def related(fault: str, other: str) -> bool:
    """Return whether two faults may share a cause: of one family, or one of them without a family."""
    families = {FAMILIES.get(fault, ""), FAMILIES.get(other, "")}
    return len(families) == 1 or "" in families


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
