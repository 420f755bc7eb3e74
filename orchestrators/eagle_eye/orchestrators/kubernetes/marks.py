"""The marks that an exclusion sets on a node, and who owns a node's cordon. Pure.

Three marks are set in one patch: the cordon, a taint and an annotation that says who did it and why. The cordon itself
has no author; the API server's record of who set the field (managedFields) has, where it exists. An administrator's
changes to a node are kept: a node that was already cordoned is not marked at all, and a node whose marks have been
changed is not uncordoned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from eagle_eye.orchestrators.kubernetes.objects import ClusterNode, Taint
from eagle_eye.orchestrators.protocol import Cause

# The server's job source takes a cordon for ours where a key contains "eagle-eye".
ANNOTATION = "eagle-eye/exclusion"
TAINT = "eagle-eye/excluded"
CONDITION = "EagleEyeFault"
MANAGER = "eagle-eye"  # the field manager under which the API server records what we set

TaintEffect = Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]
ConditionStatus = Literal["True", "False"]
MESSAGE_CHARACTERS_MAX = 1_000


class ExclusionMark(msgspec.Struct, frozen=True):
    """The annotation's value, as JSON. ``since`` is RFC 3339, ``taint`` the effect that was set with it."""

    owner: str
    incident: str
    action: str
    reason: str
    since: str
    taint: str


class Whose(NamedTuple):
    """Who owns a node's exclusion; ``ours`` is the annotation where it is ours and intact.

    ``state`` "free": not cordoned; "ours": all marks are unchanged; "uncordoned": ours, but the cordon was lifted
    since; "theirs": the cordon is another owner's; "taken": our marks were changed by another owner. ``why`` details
    the last two.
    """

    state: Literal["free", "ours", "uncordoned", "theirs", "taken"]
    ours: ExclusionMark | None = None
    why: str = ""


def whose(node: ClusterNode, owner: str) -> Whose:
    """Return who owns the node's exclusion, as seen by ``owner``."""
    cordoned = node.spec.unschedulable
    text = (node.metadata.annotations or {}).get(ANNOTATION)
    if text is None:
        return Whose("theirs", None, "cordoned by somebody else") if cordoned else Whose("free")
    ours = _decoded(text)
    if not cordoned:
        return Whose("uncordoned", ours) if ours is not None and ours.owner == owner else Whose("free")
    if ours is None:
        return Whose("taken", None, f"its annotation {ANNOTATION} was changed")
    if ours.owner != owner:
        return Whose("taken", None, f"excluded by {ours.owner[:64]!r}")
    taints = [(taint.value, taint.effect) for taint in node.spec.taints or () if taint.key == TAINT]
    if taints != [(taint_value(ours.reason), ours.taint)]:
        return Whose("taken", ours, f"its taint {TAINT} was changed")
    manager = _who_cordoned(node)
    if manager is not None and manager != MANAGER:
        return Whose("theirs", ours, f"cordoned anew by {manager[:64]!r}")
    return Whose("ours", ours)


def marking(node: ClusterNode, cause: Cause, owner: str, effect: TaintEffect, since: str) -> dict[str, Any]:
    """Return the patch that cordons the node and says why; it fails where the node has changed meanwhile."""
    ours = ExclusionMark(owner, cause.incident_id, cause.action_id, _line(cause.reason), since, effect)
    taints = [taint for taint in node.spec.taints or () if taint.key != TAINT]
    taints.append(Taint(TAINT, taint_value(ours.reason), effect))
    return {
        "metadata": {
            "resourceVersion": node.metadata.resource_version,
            "annotations": {ANNOTATION: msgspec.json.encode(ours).decode()},
        },
        "spec": {"unschedulable": True, "taints": [msgspec.to_builtins(taint) for taint in taints]},
    }


def unmarking(node: ClusterNode, *, uncordon: bool) -> dict[str, Any]:
    """Return the patch that removes our marks; the cordon only with ``uncordon``."""
    taints = [taint for taint in node.spec.taints or () if taint.key != TAINT]
    spec: dict[str, Any] = {"taints": [msgspec.to_builtins(taint) for taint in taints] or None}
    if uncordon:
        spec["unschedulable"] = None
    return {
        "metadata": {"resourceVersion": node.metadata.resource_version, "annotations": {ANNOTATION: None}},
        "spec": spec,
    }


def condition(status: ConditionStatus, reason: str, message: str, now: str) -> dict[str, Any]:
    """Return the patch that sets our condition in the node's status: "True" means a fault."""
    return {
        "status": {
            "conditions": [
                {
                    "type": CONDITION,
                    "status": status,
                    "reason": camel(reason),
                    "message": _line(message),
                    "lastHeartbeatTime": now,
                    "lastTransitionTime": now,
                }
            ]
        }
    }


def has_condition(node: ClusterNode, status: str, message: str) -> bool:
    """Return whether our condition already has this status and message."""
    said = [item for item in node.status.conditions or () if item.type == CONDITION]
    return [(item.status, item.message) for item in said] == [(status, _line(message))]


def shows_fault(node: ClusterNode) -> bool:
    """Return whether our condition shows a fault."""
    return any(item.type == CONDITION and item.status != "False" for item in node.status.conditions or ())


def taint_value(reason: str) -> str:
    """Return the fault in the form allowed in a taint: a reason begins with it."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", reason.partition(":")[0].strip())[:63].strip("_.-") or "fault"


def camel(text: str) -> str:
    """Return a condition's reason: ``gpu_memory_error`` as ``GpuMemoryError``."""
    words = re.findall(r"[A-Za-z0-9]+", text)
    joined = "".join(word[:1].upper() + word[1:] for word in words)[:128]
    return joined if joined[:1].isalpha() else f"Fault{joined}"


def _line(text: str) -> str:
    return " ".join(text.split())[:MESSAGE_CHARACTERS_MAX]


def _decoded(text: str) -> ExclusionMark | None:
    try:
        return msgspec.json.decode(text, type=ExclusionMark)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _who_cordoned(node: ClusterNode) -> str | None:
    """Return who set ``spec.unschedulable``; None where the API server keeps no record."""
    for entry in node.metadata.managed_fields or ():
        spec = (entry.fields or {}).get("f:spec")
        if isinstance(spec, Mapping) and "f:unschedulable" in spec:
            return entry.manager
    return None
