"""Converts Kubernetes' pods to jobs, and its nodes to ours. Pure; reads only the fields declared below.

A pod that is deleted, evicted or preempted was stopped by somebody: its containers exit because of that, which is no
crash. A pod whose container failed before its deletion was requested did fail, even if its controller then deletes it.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from eagle_eye.schema.names import NAME_CHARS_MAX
from eagle_eye.server.jobs.source import TEXT_CHARS_MAX, KubernetesSettings, ScheduledJob, ScheduledNode, ScheduledState

ATTEMPT_MAX = (1 << 31) - 1
MARK = "eagle-eye"  # in the key of what our subscribers leave on a node that they cordon
# Labels by which controllers identify a pod within its job; unique in combination.
PLACES = (
    "jobset.sigs.k8s.io/replicatedjob-name",
    "jobset.sigs.k8s.io/job-index",
    "training.kubeflow.org/replica-type",
    "training.kubeflow.org/replica-index",
    "batch.kubernetes.io/job-completion-index",
)
DISRUPTED = "DisruptionTarget"
# Disruption reasons of nodes that are gone or unreachable: there the platform stopped nothing.
OF_LOST_NODES = frozenset({"DeletionByTaintManager", "DeletionByPodGC"})

Labels = dict[str, str]


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """Metadata of all objects. ``deletion_timestamp`` is its deadline: the grace period after the request."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: dt.datetime | None = None
    labels: Labels | None = None
    annotations: Labels | None = None
    deletion_timestamp: dt.datetime | None = None
    deletion_grace_period_seconds: float | None = None


class Condition(msgspec.Struct, frozen=True):
    """One condition of a pod."""

    type: str = ""
    status: str = ""
    reason: str = ""


class Terminated(msgspec.Struct, frozen=True, rename="camel"):
    """How a container ended."""

    exit_code: int = 0
    reason: str = ""
    finished_at: dt.datetime | None = None


class ContainerState(msgspec.Struct, frozen=True):
    """A container's state; ``terminated`` is None unless it has ended."""

    terminated: Terminated | None = None


class ContainerStatus(msgspec.Struct, frozen=True, rename="camel"):
    """One container."""

    state: ContainerState = ContainerState()


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    """Where the pod runs; "" while it is unscheduled."""

    node_name: str = ""


class PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    """A pod's status."""

    phase: str = ""
    reason: str = ""
    start_time: dt.datetime | None = None
    conditions: Sequence[Condition] | None = None
    container_statuses: Sequence[ContainerStatus] | None = None


class Pod(msgspec.Struct, frozen=True):
    """A pod."""

    metadata: Metadata = Metadata()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class Taint(msgspec.Struct, frozen=True):
    """A node's taint."""

    key: str = ""
    value: str = ""
    effect: str = ""


class NodeSpec(msgspec.Struct, frozen=True):
    """Whether the node accepts pods."""

    unschedulable: bool = False
    taints: Sequence[Taint] | None = None


class KubernetesNode(msgspec.Struct, frozen=True):
    """A node."""

    metadata: Metadata = Metadata()
    spec: NodeSpec = NodeSpec()


def jobs_of(pods: Iterable[Pod], settings: KubernetesSettings, left_out: Counter[str]) -> tuple[ScheduledJob, ...]:
    """Return the jobs that the pods' labels name, each from the pods of its latest attempt; other pods are ignored."""
    members: dict[tuple[str, str], dict[int, list[Pod]]] = {}
    for pod in pods:
        name = _labelled(pod, settings.job_labels)
        if name is None:
            continue  # most pods belong to no job
        if not name.isprintable() or len(name) > NAME_CHARS_MAX:
            left_out["malformed"] += 1
        else:
            attempts = members.setdefault((pod.metadata.namespace, name), {})
            attempts.setdefault(_attempt(pod, settings.attempt_labels), []).append(pod)
    return tuple(
        _job(namespace, name, max(attempts), _newest(attempts[max(attempts)]), settings.owner_labels)
        for (namespace, name), attempts in sorted(members.items())
    )


def node_of(node: KubernetesNode) -> ScheduledNode:
    """Return whether the node accepts pods. Nodes that are not ready, or unreachable, get no other standing for that.

    A cordon has no author and no reason. It counts as ours if the node has a taint, label or annotation of ours.
    """
    name = node.metadata.name
    if not node.spec.unschedulable:
        return ScheduledNode(name, "in_service")
    keys = (taint.key for taint in node.spec.taints or ())
    ours = any(MARK in key for key in (*keys, *(node.metadata.annotations or {}), *(node.metadata.labels or {})))
    return ScheduledNode(name, "draining", f"{MARK}: cordoned" if ours else "cordoned")


def _labelled(pod: Pod, keys: Sequence[str]) -> str | None:
    labels: Mapping[str, str] = pod.metadata.labels or {}
    return next((labels[key] for key in keys if labels.get(key)), None)


def _newest(pods: Iterable[Pod]) -> list[Pod]:
    """Return the pods without replaced ones: a controller keeps a failed pod beside its successor."""
    found: dict[tuple[str, ...], Pod] = {}
    for pod in sorted(pods, key=_created_s):
        labels = pod.metadata.labels or {}
        place = tuple(labels.get(key, "") for key in PLACES)
        found[place if any(place) else (pod.metadata.name,)] = pod
    return list(found.values())


def _created_s(pod: Pod) -> float:
    created = pod.metadata.creation_timestamp
    return created.timestamp() if created is not None else 0.0


def _attempt(pod: Pod, keys: Sequence[str]) -> int:
    said = _said(pod)
    text = next((said[key] for key in keys if key in said), "0")
    return min(int(text), ATTEMPT_MAX) if text.isascii() and text.isdigit() and len(text) <= 10 else 0


def _said(pod: Pod) -> dict[str, str]:
    return {**(pod.metadata.annotations or {}), **(pod.metadata.labels or {})}


def _owner(pods: Iterable[Pod], keys: Sequence[str]) -> str:
    """Return the pods' owner; "" if unknown or if the pods disagree."""
    found = {next((said[key] for key in keys if said.get(key)), "") for said in map(_said, pods)} - {""}
    owner = found.pop() if len(found) == 1 else ""
    return owner if owner.isprintable() and len(owner) <= TEXT_CHARS_MAX else ""


def _job(namespace: str, name: str, attempt: int, pods: list[Pod], owner_labels: Sequence[str]) -> ScheduledJob:
    states = Counter(_state(pod) for pod in pods)
    starts = [pod.status.start_time.timestamp() for pod in pods if pod.status.start_time is not None]
    said = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return ScheduledJob(
        id=f"{namespace}/{name}",
        name=name,
        state=_of_pods(states),
        attempt=attempt,
        nodes=tuple(sorted({pod.spec.node_name for pod in pods if pod.spec.node_name})),
        started_s=min(starts, default=None),
        said=f"pods: {said}",
        owner=_owner(pods, owner_labels),
    )


def _of_pods(states: Counter[ScheduledState]) -> ScheduledState:
    """Return a job's state from its pods'. A pod that failed by itself explains why the others are deleted."""
    for state in ("failed", "preempted", "timeout", "cancelled"):
        if states[state]:
            return state
    if states["running"]:
        return "running"
    return "pending" if states["pending"] else "finished"


def _state(pod: Pod) -> ScheduledState:
    status, asked_s = pod.status, _deletion_asked_s(pod)
    disruptions = [c.reason for c in status.conditions or () if c.type == DISRUPTED and c.status == "True"]
    if _failed_before(pod, asked_s) and not disruptions:
        return "timeout" if status.reason == "DeadlineExceeded" else "failed"
    if disruptions:
        return "failed" if set(disruptions) <= OF_LOST_NODES else "preempted"
    if status.reason in ("Evicted", "Preempting", "Shutdown", "NodeShutdown", "Terminated"):
        return "preempted"
    if asked_s is not None:
        return "cancelled"
    return {"Pending": "pending", "Succeeded": "finished"}.get(status.phase, "running")  # type: ignore[return-value]


def _deletion_asked_s(pod: Pod) -> float | None:
    """Return when the pod's deletion was requested; None if it was not."""
    ends = pod.metadata.deletion_timestamp
    return None if ends is None else ends.timestamp() - (pod.metadata.deletion_grace_period_seconds or 0.0)


def _failed_before(pod: Pod, asked_s: float | None) -> bool:
    """Return whether the pod, or one of its containers, failed before its deletion was requested."""
    ends = [c.state.terminated for c in pod.status.container_statuses or () if c.state.terminated is not None]
    failed = [end for end in ends if end.exit_code != 0]
    if asked_s is None:
        return pod.status.phase == "Failed" or bool(failed)
    # Kubernetes' times are whole seconds: what ended in the second of the request may have ended because of it.
    return any(end.finished_at is not None and end.finished_at.timestamp() < asked_s for end in failed)
