"""The fields of Kubernetes objects that are used: nodes, pods, API errors. Pure.

Only the fields below are decoded, so that servers of any version are understood; unknown fields are ignored.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from eagle_eye.orchestrators.protocol import CannotCarryOutError, Cause

Texts = Mapping[str, str]

TERMINAL_PHASES = frozenset({"Succeeded", "Failed"})


class ManagedFields(msgspec.Struct, frozen=True, rename={"fields": "fieldsV1"}):
    """Which fields a manager has set: the API server's own record, from Kubernetes 1.18 on."""

    manager: str = ""
    fields: Mapping[str, Any] | None = None


class OwnerReference(msgspec.Struct, frozen=True):
    """An object's owner reference."""

    kind: str = ""
    name: str = ""


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """Metadata common to all objects."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: dt.datetime | None = None
    deletion_timestamp: dt.datetime | None = None
    labels: Texts | None = None
    annotations: Texts | None = None
    owner_references: Sequence[OwnerReference] | None = None
    managed_fields: Sequence[ManagedFields] | None = None


class Taint(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A taint. ``time_added`` is the text written by the API server, kept unchanged."""

    key: str = ""
    value: str = ""
    effect: str = ""
    time_added: str = ""


class NodeSpec(msgspec.Struct, frozen=True):
    """Whether pods can be scheduled."""

    unschedulable: bool = False
    taints: Sequence[Taint] | None = None


class Condition(msgspec.Struct, frozen=True, rename="camel"):
    """One condition of a node or pod."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class NodeStatus(msgspec.Struct, frozen=True):
    """A node's status."""

    conditions: Sequence[Condition] | None = None


class ClusterNode(msgspec.Struct, frozen=True):
    """A node."""

    metadata: Metadata = Metadata()
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class ContainerRunning(msgspec.Struct, frozen=True, rename="camel"):
    """A running container."""

    started_at: dt.datetime | None = None


class ContainerState(msgspec.Struct, frozen=True):
    """A container's state; None: not in that state."""

    running: ContainerRunning | None = None


class ContainerStatus(msgspec.Struct, frozen=True):
    """One container."""

    state: ContainerState = ContainerState()


class Requirements(msgspec.Struct, frozen=True):
    """A container's resources, each a number or text."""

    limits: Mapping[str, Any] | None = None


class Container(msgspec.Struct, frozen=True):
    """A container's specification."""

    resources: Requirements = Requirements()


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The pod's node, "" while unscheduled, and its containers."""

    node_name: str = ""
    containers: Sequence[Container] | None = None


class PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    """A pod's status."""

    phase: str = ""
    conditions: Sequence[Condition] | None = None
    container_statuses: Sequence[ContainerStatus] | None = None


class Pod(msgspec.Struct, frozen=True):
    """A pod."""

    metadata: Metadata = Metadata()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def full_name(self) -> str:
        """Return NAMESPACE/NAME."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def live(self) -> bool:
        """Whether the pod has not ended and its deletion was not requested."""
        return self.status.phase not in TERMINAL_PHASES and self.metadata.deletion_timestamp is None

    @property
    def runs(self) -> bool:
        """Whether the pod is live and its containers were started."""
        return self.live and self.status.phase == "Running"


class ListPage(msgspec.Struct, frozen=True):
    """One page of a list; ``metadata.more`` requests the next one."""

    items: Sequence[msgspec.Raw] = ()
    metadata: PageMetadata = msgspec.field(default_factory=lambda: PageMetadata())  # noqa: PLW0108 - it is defined below


class PageMetadata(msgspec.Struct, frozen=True, rename={"more": "continue"}):
    """A list's metadata; ``more`` is "" on the last page."""

    more: str = ""


class Resource(msgspec.Struct, frozen=True):
    """A kind of object, or a subresource, in the API."""

    name: str = ""
    version: str = ""


class Resources(msgspec.Struct, frozen=True):
    """The resources of one API group."""

    resources: Sequence[Resource] = ()


class ErrorCause(msgspec.Struct, frozen=True):
    """One cause of an error."""

    reason: str = ""
    message: str = ""


class ErrorDetails(msgspec.Struct, frozen=True):
    """Details of an error."""

    causes: Sequence[ErrorCause] | None = None


class Status(msgspec.Struct, frozen=True):
    """An API error."""

    message: str = ""
    reason: str = ""
    details: ErrorDetails | None = None

    @property
    def text(self) -> str:
        """Return the message and its causes in one line."""
        causes = [cause.message for cause in (self.details.causes if self.details else None) or () if cause.message]
        return f"{self.message} ({'; '.join(causes)})" if causes else self.message


# Finds a job's pods and its state. Pure; by the rules of docs/how-to/job-sources.md, as in the server.
#
# The first of the labels that a pod has names its job. Of pods that replaced each other only the newest counts.
# The server's configuration defaults: [job_sources.kubernetes] job_labels, attempt_labels.
JOB_LABELS = (
    "eagle_eye_job",
    "jobset.sigs.k8s.io/jobset-name",
    "training.kubeflow.org/job-name",
    "volcano.sh/job-name",
    "leaderworkerset.sigs.k8s.io/name",
    "batch.kubernetes.io/job-name",
    "job-name",
)
ATTEMPT_LABELS = ("eagle_eye_attempt", "jobset.sigs.k8s.io/restart-attempt", "volcano.sh/job-version")
# The labels with which controllers number a job's pods: together they identify a pod within it.
PLACES = (
    "jobset.sigs.k8s.io/replicatedjob-name",
    "jobset.sigs.k8s.io/job-index",
    "training.kubeflow.org/replica-type",
    "training.kubeflow.org/replica-index",
    "batch.kubernetes.io/job-completion-index",
)
ATTEMPT_MAX = (1 << 31) - 1
_LABEL_VALUE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?\Z")


def selectors(job: str, job_labels: Sequence[str]) -> list[str]:
    """Return the label selectors that find the job's pods; none where its name is not a valid label value."""
    return [f"{label}={job}" for label in job_labels] if _LABEL_VALUE.match(job) else []


def found_by(job: str, pods: Iterable[Pod], job_labels: Sequence[str]) -> list[str]:
    """Return the selectors that find these pods: one per label that names the job, also on their replacements."""
    labels = {next((key for key in job_labels if (pod.metadata.labels or {}).get(key)), "") for pod in pods}
    return [f"{label}={job}" for label in job_labels if label in labels]


def pods_of(job: str, found: Iterable[Pod], job_labels: Sequence[str]) -> list[Pod]:
    """Return the job's pods, each once. Raises CannotCarryOutError where two jobs have the name."""
    pods = {pod.metadata.uid: pod for pod in found if _labelled(pod, job_labels) == job}
    spaces = sorted({pod.metadata.namespace for pod in pods.values()})
    if len(spaces) > 1:
        named = ", ".join(spaces[:8])
        raise CannotCarryOutError(f"job {job!r} is in {len(spaces)} namespaces ({named}): name one with --namespace")
    return sorted(pods.values(), key=lambda pod: pod.metadata.name)


def attempt_of(pods: Iterable[Pod], attempt_labels: Sequence[str]) -> int:
    """Return the latest attempt in the pods' labels or annotations; 0 where there is none."""
    return max((_attempt(pod, attempt_labels) for pod in pods), default=0)


def members(pods: Iterable[Pod], attempt_labels: Sequence[str]) -> list[Pod]:
    """Return the pods of the latest attempt, without replaced ones."""
    known = list(pods)
    latest = attempt_of(known, attempt_labels)
    newest: dict[tuple[str, ...], Pod] = {}
    for pod in sorted(known, key=lambda pod: (created_s(pod), pod.live)):
        if _attempt(pod, attempt_labels) == latest:
            newest[place(pod)] = pod
    return sorted(newest.values(), key=lambda pod: pod.metadata.name)


def place(pod: Pod) -> tuple[str, ...]:
    """Return the pod's identity within its job: from its controller's labels, or its name."""
    labels = pod.metadata.labels or {}
    found = tuple(labels.get(key, "") for key in PLACES)
    return found if any(found) else (pod.metadata.name,)


def created_s(pod: Pod) -> float:
    """Return when the pod was created, a Unix time in whole seconds; 0 where unknown."""
    created = pod.metadata.creation_timestamp
    return created.timestamp() if created is not None else 0.0


def began_s(pod: Pod) -> float:
    """Return when the pod last started: its creation, or the restart of its last container.

    A pod with a container that has kept running has not restarted.
    """
    running = [status.state.running for status in pod.status.container_statuses or () if status.state.running]
    starts = [state.started_at.timestamp() for state in running if state.started_at is not None]
    return max(created_s(pod), min(starts, default=0.0))


def _labelled(pod: Pod, keys: Sequence[str]) -> str | None:
    labels = pod.metadata.labels or {}
    return next((labels[key] for key in keys if labels.get(key)), None)


def _attempt(pod: Pod, keys: Sequence[str]) -> int:
    said = {**(pod.metadata.annotations or {}), **(pod.metadata.labels or {})}
    text = next((said[key] for key in keys if key in said), "0")
    return min(int(text), ATTEMPT_MAX) if text.isascii() and text.isdigit() and len(text) <= 10 else 0


# The marks that an exclusion sets on a node, and who owns a node's cordon.
#
# Three marks are set in one patch: the cordon, a taint and an annotation that says who did it and why. The cordon
# itself has no author; the API server's record of who set the field (managedFields) has, where it exists. An
# administrator's changes to a node are kept: a node that was already cordoned is not marked at all, and a node whose
# marks have been changed is not uncordoned.
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
