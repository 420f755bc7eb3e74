"""The controllers of a job's pods, their size, and the patches that resize them. Pure.

Each pod has a node of its own. An Indexed Job takes completions together with parallelism (from Kubernetes 1.27 on), a
JobSet those of its only Job (from the version with elastic JobSets on, which patches the Job), a workers-only
PyTorchJob its number of workers, within its elastic policy. Each change is recorded in an annotation, so that another
process knows how many pods there were, and which got the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from eagle_eye.orchestrators.errors import CannotCarryOutError
from eagle_eye.orchestrators.kubernetes.objects import Pod

LAYOUT = "eagle-eye/layout"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
GPU = "nvidia.com/gpu"


class WorkloadKind(NamedTuple):
    """A kind's place in the API."""

    group: str
    version: str
    plural: str


KINDS = {
    "Job": WorkloadKind("batch", "v1", "jobs"),
    "JobSet": WorkloadKind("jobset.x-k8s.io", "v1alpha2", "jobsets"),
    "PyTorchJob": WorkloadKind("kubeflow.org", "v1", "pytorchjobs"),
}


class Ref(NamedTuple):
    """A reference to one object."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


class ScaleChange(msgspec.Struct, frozen=True):
    """Our last change: ``wanted`` pods became ``pods``, since a Unix time, for an action."""

    wanted: int
    pods: int
    since_s: int
    action: str


class Workload(NamedTuple):
    """A job's controller: its number of pods, and our last change if still in effect, None for none."""

    ref: Ref
    pods: int
    change: ScaleChange | None
    body: Mapping[str, Any]

    @property
    def wanted(self) -> int:
        """The number of pods that it wants where there is a node for each."""
        return self.pods if self.change is None else self.change.wanted


def made_by(pods: Iterable[Pod]) -> Ref:
    """Return the pods' controller. Raises CannotCarryOutError where it is not one object, or has no size."""
    refs = {_maker(pod) for pod in pods}
    if len(refs) != 1:
        raise CannotCarryOutError(f"its pods are made by {len(refs)} objects, not by one")
    (ref,) = refs
    if ref is None or ref.kind not in KINDS:
        what = "what nobody names" if ref is None else f"a {ref.kind}"
        raise CannotCarryOutError(f"its pods are made by {what}, which has no elastic size; {', '.join(KINDS)} may")
    return ref


def read(ref: Ref, body: Mapping[str, Any]) -> Workload:
    """Return the workload from its object. Raises CannotCarryOutError where it cannot run fewer pods."""
    try:
        pods = _SIZES[ref.kind](body["spec"])
    except (KeyError, TypeError, IndexError, AttributeError):
        pods = None
    if not isinstance(pods, int) or isinstance(pods, bool) or pods < 1:
        raise CannotCarryOutError(f"{ref} has no elastic size: it must be {_ELASTIC[ref.kind]}")
    return Workload(ref, pods, _change(body, pods), body)


def resized(workload: Workload, change: ScaleChange) -> dict[str, Any]:
    """Return the merge patch that sets its number of pods, unless it has changed since it was read.

    Raises CannotCarryOutError where its owner's limits exclude this number.
    """
    body = workload.body
    said = None if change.pods == change.wanted else msgspec.json.encode(change).decode()
    return {
        "metadata": {"resourceVersion": body["metadata"]["resourceVersion"], "annotations": {LAYOUT: said}},
        "spec": _SPECS[workload.ref.kind](body["spec"], change.pods),
    }


def gpus_of(pods: Iterable[Pod]) -> int | None:
    """Return how many GPUs each pod requests; None where none does, or they differ."""
    counts = set()
    for pod in pods:
        limits = [container.resources.limits or {} for container in pod.spec.containers or ()]
        counts.add(sum(int(text) for one in limits if (text := str(one.get(GPU, ""))).isdecimal()))
    return counts.pop() or None if len(counts) == 1 else None


def _maker(pod: Pod) -> Ref | None:
    space = pod.metadata.namespace
    if name := (pod.metadata.labels or {}).get(JOBSET_NAME):
        return Ref("JobSet", space, name)
    return next((Ref(owner.kind, space, owner.name) for owner in pod.metadata.owner_references or ()), None)


def _change(body: Mapping[str, Any], pods: int) -> ScaleChange | None:
    """Return our annotation's change; None where the size was changed by someone else since."""
    text = ((body.get("metadata") or {}).get("annotations") or {}).get(LAYOUT)
    try:
        change = msgspec.json.decode(text or "null", type=ScaleChange | None)
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError):
        return None
    return change if change is not None and change.pods == pods else None


def _indexed(spec: Any, by_default: str) -> int | None:
    elastic = spec.get("completionMode", by_default) == "Indexed" and spec["parallelism"] == spec["completions"]
    return spec["parallelism"] if elastic else None


def _of_jobset(spec: Any) -> int | None:
    jobs = spec["replicatedJobs"]
    alone = len(jobs) == 1 and jobs[0].get("replicas", 1) == 1
    return _indexed(jobs[0]["template"]["spec"], "Indexed") if alone else None


def _of_pytorch_job(spec: Any) -> int | None:
    replicas = spec["pytorchReplicaSpecs"]
    return replicas["Worker"]["replicas"] if spec.get("elasticPolicy") and set(replicas) == {"Worker"} else None


def _jobset_of(spec: Any, pods: int) -> dict[str, Any]:
    # A merge patch replaces lists as a whole.
    (only,) = spec["replicatedJobs"]
    template = only["template"]
    job = {**template["spec"], "parallelism": pods, "completions": pods}
    return {"replicatedJobs": [{**only, "template": {**template, "spec": job}}]}


def _pytorch_job_of(spec: Any, pods: int) -> dict[str, Any]:
    policy = spec["elasticPolicy"]
    least, most = policy.get("minReplicas") or pods, policy.get("maxReplicas") or pods
    if not least <= pods <= most:
        raise CannotCarryOutError(f"its elasticPolicy has {least} to {most} replicas, not {pods}")
    return {"pytorchReplicaSpecs": {"Worker": {"replicas": pods}}}


_SIZES: dict[str, Any] = {
    "Job": lambda spec: _indexed(spec, "NonIndexed"),
    "JobSet": _of_jobset,
    "PyTorchJob": _of_pytorch_job,
}
_SPECS: dict[str, Any] = {
    "Job": lambda _, pods: {"parallelism": pods, "completions": pods},
    "JobSet": _jobset_of,
    "PyTorchJob": _pytorch_job_of,
}
_ELASTIC = {
    "Job": "Indexed, with as many completions as parallelism",
    "JobSet": "of one Job, Indexed, with as many completions as parallelism",
    "PyTorchJob": "of workers alone, with an elasticPolicy",
}
