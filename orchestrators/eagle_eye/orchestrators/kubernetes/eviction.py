"""Selects the pods to evict for a restart, and tracks the restart's progress. Pure.

A restart evicts every pod of the job: ranks that wait for a lost one do not recover by themselves. Pods that started
after the fault was reported stay: they already belong to the next attempt. So a restart that is requested twice, or was
left half-done by a killed process, happens once. No pod of the job stays on an excluded node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NamedTuple

from eagle_eye.orchestrators.kubernetes.jobs import began_s
from eagle_eye.orchestrators.kubernetes.objects import Pod

# Kubernetes' times are whole seconds; no fault is reported within a second of a pod's start.
TIME_RESOLUTION_S = 1.0
NAMED_MAX = 8
MIRROR = "kubernetes.io/config.mirror"

Scope = Literal["job", "nodes"]


class EvictionProgress(NamedTuple):
    """A job's progress towards running again. ``waiting`` says what is missing, as text; "" where it runs again."""

    done: bool
    waiting: str
    ended: bool = False


def victims(pods: Iterable[Pod], without: Collection[str], detected_s: float | None, scope: Scope) -> list[Pod]:
    """Return the pods to evict, those on excluded nodes first.

    ``scope`` "nodes" evicts only those, if any: for jobs whose other ranks continue without them.
    """
    there = [pod for pod in pods if pod.live and pod.spec.node_name]
    leaving = [pod for pod in there if pod.spec.node_name in without]
    if scope == "nodes" and without:
        return leaving
    rest = [pod for pod in there if pod.spec.node_name not in without and not _began_after(pod, detected_s)]
    return leaving + rest


def progress(pods: Sequence[Pod], gone: Collection[str], without: Collection[str], expected: int) -> EvictionProgress:
    """Return the job's progress: ``pods`` are its members now, ``gone`` the uids of those that were evicted.

    It runs again when as many pods as before run, none of them evicted and none on an excluded node.
    """
    live = [pod for pod in pods if pod.live and pod.metadata.uid not in gone]
    back = [pod for pod in live if pod.spec.node_name in without]
    if back:
        where = ", ".join(f"{pod.full_name} on {pod.spec.node_name}" for pod in back[:NAMED_MAX])
        return EvictionProgress(
            False, f"in spite of taint and cordon: {where}; look at the pod's tolerations and nodeName"
        )
    running = [pod for pod in live if pod.runs]
    if len(live) >= expected > 0 and len(running) == len(live):
        return EvictionProgress(True, "")
    if pods and not live and all(pod.status.phase == "Succeeded" for pod in pods):
        return EvictionProgress(True, "", ended=True)
    missing = [f"{pod.full_name} waits{_why(pod)}" for pod in live if not pod.runs]
    absent = expected - len(live)
    if absent > 0:
        leaving = [pod.full_name for pod in pods if pod.metadata.deletion_timestamp is not None]
        text = f"{absent} of {expected} pods are not back"
        if leaving:
            text += f"; still ending: {named(leaving)}"
        missing.insert(0, text)
    return EvictionProgress(False, "; ".join(missing[:NAMED_MAX]))


def stale(pods: Iterable[Pod], since_s: float) -> list[Pod]:
    """Return the pods on nodes that started before the job was resized: they got the previous layout."""
    return [pod for pod in pods if pod.live and pod.spec.node_name and began_s(pod) <= since_s]


def places(pods: Iterable[Pod], gone: Collection[str], without: Collection[str]) -> int | None:
    """Return how many of a job's pods have a node, once the scheduler finds none for the others; None: not yet.

    Nodes do not count as full while evicted pods are still terminating there.
    """
    here = [pod for pod in pods if pod.spec.node_name not in without]
    if any(pod.metadata.uid in gone for pod in here if pod.spec.node_name):
        return None
    live = [pod for pod in here if pod.live]
    placed = [pod for pod in live if pod.spec.node_name]
    return len(placed) if any(_has_no_place(pod) for pod in live) else None


def _has_no_place(pod: Pod) -> bool:
    said = pod.status.conditions or ()
    return not pod.spec.node_name and any(one.type == "PodScheduled" and one.status == "False" for one in said)


def bystanders(there: Iterable[Pod], job_uids: Collection[str]) -> list[str]:
    """Return which other pods run on a node, except the job's and the node's own."""
    return sorted(
        pod.full_name
        for pod in there
        if pod.live
        and pod.metadata.uid not in job_uids
        and MIRROR not in (pod.metadata.annotations or {})
        and not any(owner.kind in ("DaemonSet", "Node") for owner in pod.metadata.owner_references or ())
    )


def named(names: Sequence[str]) -> str:
    """Return some of the names, and how many more there are."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more


def _began_after(pod: Pod, detected_s: float | None) -> bool:
    return detected_s is not None and began_s(pod) > detected_s - TIME_RESOLUTION_S


def _why(pod: Pod) -> str:
    """Return the scheduler's reason for a pod that it cannot place."""
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False" and condition.message:
            return f" for a node: {condition.message[:300]}"
    return f" on {pod.spec.node_name}" if pod.spec.node_name else ""
