"""Kubernetes API calls through the official client, and the meaning of their errors. Touches the network.

The client supports everything in a kubeconfig (certificates, renewed tokens, plug-ins); we decode answers field by
field, since its models reject answers of other server versions. The required RBAC rights are exactly those in
packaging/kubernetes/orchestrator.yaml, plus those for jobs that get a ConfigMap entry or are resized.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
import urllib3
from kubernetes import client as official
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from eagle_eye.orchestrators.kubernetes import objects
from eagle_eye.orchestrators.kubernetes.objects import ClusterNode, ListPage, Pod, Resources, Status
from eagle_eye.orchestrators.protocol import CannotCarryOutError

# The controllers of a job's pods, their size, and the patches that resize them.
#
# Each pod has a node of its own. An Indexed Job takes completions together with parallelism (from Kubernetes 1.27 on),
# a JobSet those of its only Job (from the version with elastic JobSets on, which patches the Job), a workers-only
# PyTorchJob its number of workers, within its elastic policy. Each change is recorded in an annotation, so that
# another process knows how many pods there were, and which got the layout.
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


PAGE = 500  # objects per answer
PAGES_MAX = 200
STRATEGIC = "application/strategic-merge-patch+json"
MERGE = "application/merge-patch+json"
# Names only: the server omits the rest of each object.
NAMES_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
FROM_CACHE = "0"  # from the API server's cache, which is cheap and may be slightly stale
TIMEOUT_S = 10.0
RETRY_AFTER_S = (0.2, 0.5, 1.0)
_BUSY = frozenset({429, 500, 502, 503, 504})

ShapeT = TypeVar("ShapeT")


class Conflict(Exception):
    """The object has changed since it was read: read it again."""


class Eviction(NamedTuple):
    """The result of an eviction: the pod is gone, or kept for now, with the reason."""

    gone: bool
    why: str = ""


class _OnlyMetadata(msgspec.Struct, frozen=True):
    name: str = ""


class _Named(msgspec.Struct, frozen=True):
    metadata: _OnlyMetadata = _OnlyMetadata()


class Api:
    """One cluster, thread-safe. Every method raises CannotCarryOutError where the server refuses."""

    def __init__(self, client: official.ApiClient, pause: Callable[[float], object] = time.sleep) -> None:
        self._client = client
        self._core = official.CoreV1Api(client)
        self._custom = official.CustomObjectsApi(client)
        self._pause = pause
        self._eviction: str | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def node(self, name: str) -> ClusterNode | None:
        """Return the node's current state; None where there is no node of this name."""
        try:
            body = self._ask(f"get node {name}", lambda: self._core.read_node(name, **_RAW))
        except ApiException as error:
            if error.status == 404:
                return None
            raise refused(f"get node {name}", error) from None
        return _decode(body, ClusterNode, f"node {name}")

    def node_names(self) -> frozenset[str]:
        """Return the names of all nodes of the cluster, from the API server's cache."""
        return frozenset(item.metadata.name for item in self._pages("list nodes", self._list_names, _Named))

    def pods(
        self, namespaces: Iterable[str], *, label: str | None = None, node: str | None = None, cached: bool = False
    ) -> list[Pod]:
        """Return the pods with the label selector, or on the node, in these namespaces; none given: in all."""
        where = {
            **({"label_selector": label} if label else {}),
            **({"field_selector": f"spec.nodeName={node}"} if node else {}),
            **({"resource_version": FROM_CACHE} if cached else {}),
        }
        found: list[Pod] = []
        for namespace in namespaces or ("",):
            what = f"list pods in {namespace}" if namespace else "list pods"
            # From its cache the server returns everything at once, and supports no limit.
            page = where if cached else {**where, "limit": PAGE}
            found += self._pages(what, lambda more, n=namespace, p=page: self._list_pods(n, {**p, **more}), Pod)  # type: ignore[misc]
        return found

    def mark(self, node: str, patch: dict[str, Any]) -> None:
        """Patch the node. Raises Conflict where it has changed since it was read."""
        what = f"patch node {node}"
        self._patch(what, lambda: self._core.patch_node(node, patch, _content_type=MERGE, **_OURS))

    def set_condition(self, node: str, patch: dict[str, Any]) -> None:
        """Set this condition in the node's status."""
        what = f"patch nodes/status of {node}"
        self._patch(what, lambda: self._core.patch_node_status(node, patch, _content_type=STRATEGIC, **_OURS))

    def set_config_map_key(self, config_map: str, namespace: str, key: str, text: str | None) -> bool:
        """Set the ConfigMap's key to the text, or remove it with None; False where there is no such ConfigMap."""
        what = f"patch configmap {config_map} in {namespace}"
        patch = {"data": {key: text}}
        try:
            self._ask(
                what,
                lambda: self._core.patch_namespaced_config_map(
                    config_map, namespace, patch, _content_type=MERGE, **_OURS
                ),
            )
        except ApiException as error:
            if error.status == 404:
                return False
            raise refused(what, error) from None
        return True

    def workload(self, ref: Ref) -> dict[str, Any]:
        """Return the current object that controls a job's pods."""
        kind = KINDS[ref.kind]
        try:
            body = self._ask(
                f"get {ref}",
                lambda: self._custom.get_namespaced_custom_object(
                    kind.group, kind.version, ref.namespace, kind.plural, ref.name, **_RAW
                ),
            )
        except ApiException as error:
            raise refused(f"get {ref}", error) from None
        return _decode(body, dict[str, Any], str(ref))

    def change_workload(self, ref: Ref, patch: dict[str, Any]) -> None:
        """Patch the object. Raises Conflict where it has changed since it was read."""
        kind = KINDS[ref.kind]
        self._patch(
            f"patch {ref}",
            lambda: self._custom.patch_namespaced_custom_object(
                kind.group, kind.version, ref.namespace, kind.plural, ref.name, patch, _content_type=MERGE, **_OURS
            ),
        )

    def evict(self, pod: Pod) -> Eviction:
        """Evict the pod, unless a PodDisruptionBudget prevents it or it has been replaced."""
        name, space = pod.metadata.name, pod.metadata.namespace
        body = official.V1Eviction(
            api_version=self._eviction_version(),
            kind="Eviction",
            metadata=official.V1ObjectMeta(name=name, namespace=space),
            delete_options=official.V1DeleteOptions(preconditions=official.V1Preconditions(uid=pod.metadata.uid)),
        )
        what = f"evict pod {pod.full_name}"
        try:
            self._ask(
                what, lambda: self._core.create_namespaced_pod_eviction(name, space, body, **_RAW), busy=_BUSY - {429}
            )
        except ApiException as error:
            if error.status in (404, 409):  # it is gone, or a new one has its name
                return Eviction(True)
            if error.status == 429:
                return Eviction(False, _said(error) or "the API server asks to try again later")
            raise refused(what, error) from None
        return Eviction(True)

    def _eviction_version(self) -> str:
        """Return the API version for evictions: policy/v1beta1 before Kubernetes 1.22."""
        with self._lock:
            if self._eviction is None:
                try:
                    body = self._ask("discover", lambda: self._core.get_api_resources(**_RAW))
                except ApiException as error:
                    raise refused("discover", error) from None
                known = _decode(body, Resources, "the API's resources").resources
                version = next((item.version for item in known if item.name == "pods/eviction"), "v1")
                self._eviction = f"policy/{version}"
            return self._eviction

    def _list_names(self, more: dict[str, Any]) -> Any:
        asked: dict[str, Any] = {"limit": PAGE, **more}
        return self._core.list_node(**asked, _headers={"Accept": NAMES_ONLY}, **_RAW)

    def _list_pods(self, namespace: str, asked: dict[str, Any]) -> Any:
        if namespace:
            return self._core.list_namespaced_pod(namespace, **asked, **_RAW)
        return self._core.list_pod_for_all_namespaces(**asked, **_RAW)

    def _pages(self, what: str, ask: Callable[[dict[str, Any]], Any], shape: type[ShapeT]) -> list[ShapeT]:
        found: list[ShapeT] = []
        more: dict[str, Any] = {}
        for _ in range(PAGES_MAX):
            asked = dict(more)
            try:
                body = self._ask(what, lambda asked=asked: ask(asked))  # type: ignore[misc]
            except ApiException as error:
                raise refused(what, error) from None
            page = _decode(body, ListPage, what)
            found += [_decode(item, shape, what) for item in page.items]
            if not page.metadata.more:
                return found
            more = {"_continue": page.metadata.more}
        raise CannotCarryOutError(f"{what}: more than {PAGES_MAX * PAGE} objects")

    def _patch(self, what: str, patch: Callable[[], Any]) -> None:
        try:
            self._ask(what, patch)
        except ApiException as error:
            if error.status == 409:
                raise Conflict from None
            raise refused(what, error) from None

    def _ask(self, what: str, call: Callable[[], Any], busy: frozenset[int] = _BUSY) -> bytes:
        """Return the answer's body. Requests are idempotent: retried after a moment while the server is busy."""
        for pause_s in (*RETRY_AFTER_S, None):
            try:
                answer = call()
                return bytes(answer.data)
            except ApiException as error:
                if pause_s is None or error.status not in busy:
                    raise
            except urllib3.exceptions.HTTPError as error:
                if pause_s is None:
                    name = type(error).__name__
                    raise CannotCarryOutError(f"{what}: the API server does not answer ({name})") from None
            except (ConfigException, OSError) as error:  # a token that cannot be read or renewed
                raise CannotCarryOutError(f"{what}: {str(error)[:300]}") from None
            self._pause(pause_s)
        raise AssertionError("unreachable")


def refused(what: str, error: ApiException) -> CannotCarryOutError:
    """Return the error for people: what was requested, what the server says, and where rights are granted."""
    said = _said(error) or str(error.reason or "")
    remedy = "; see docs/how-to/kubernetes.md, Rights" if error.status in (401, 403) else ""
    if error.status == 0:  # how the client reports a TLS failure
        return CannotCarryOutError(f"{what}: {' '.join(said.split())[:300]}")
    return CannotCarryOutError(f"{what}: the API server answers {error.status}: {said[:500]}{remedy}")


def _said(error: ApiException) -> str:
    body = error.body
    if not body:
        return ""
    try:
        return msgspec.json.decode(body, type=Status).text
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return str(body)[:200]


def _decode(body: bytes | msgspec.Raw, shape: type[ShapeT], what: str) -> ShapeT:
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CannotCarryOutError(f"{what}: the answer is not understood: {str(error)[:200]}") from None


_RAW: dict[str, Any] = {"_preload_content": False, "_request_timeout": TIMEOUT_S}
_OURS: dict[str, Any] = {**_RAW, "field_manager": objects.MANAGER}
