"""Finds a job's pods and its state. Pure; by the rules of docs/how-to/job-sources.md, as in the server.

The first of the labels that a pod has names its job. Of pods that replaced each other only the newest counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from eagle_eye.orchestrators.errors import CannotCarryOutError
from eagle_eye.orchestrators.kubernetes.objects import Pod

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
