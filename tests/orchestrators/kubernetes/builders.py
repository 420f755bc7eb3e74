"""Nodes and pods, and an API server in memory that does what Kubernetes' documentation says it does."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from eagle_eye.orchestrators.kubernetes.api import Conflict, Eviction
from eagle_eye.orchestrators.kubernetes.objects import ClusterNode, Pod
from eagle_eye.orchestrators.protocol import CannotCarryOutError, Cause

NOW_S = 1_800_000_000.0


def utc(time_s: float) -> str:
    return dt.datetime.fromtimestamp(time_s, tz=dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def cause(action: str = "act-1", incident: str = "inc-1", **changes: Any) -> Cause:
    values = {"fault": "gpu_lost", "summary": "XID 79 on GPU 3", "repair": "reboot"}
    return Cause(incident, action, **{**values, "detected_s": NOW_S, "expires_s": NOW_S + 600, **changes})


def node(name: str = "n1", **changes: Any) -> ClusterNode:
    """A node that takes pods; ``changes`` are keys of its spec, ``annotations``, ``managers`` (of the cordon)."""
    metadata: dict[str, Any] = {"name": name, "resourceVersion": "7", "annotations": changes.pop("annotations", {})}
    if (manager := changes.pop("manager", None)) is not None:
        metadata["managedFields"] = [{"manager": manager, "fieldsV1": {"f:spec": {"f:unschedulable": {}}}}]
    conditions = changes.pop("conditions", [])
    return msgspec.convert({"metadata": metadata, "spec": changes, "status": {"conditions": conditions}}, ClusterNode)


def pod(name: str, on: str = "", job: str = "train", **changes: Any) -> Pod:
    """A pod of a plain Job that runs since long before NOW_S."""
    created_s = changes.pop("created_s", NOW_S - 1_000)
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": changes.pop("namespace", "ml"),
        "uid": changes.pop("uid", f"uid-{name}"),
        "creationTimestamp": utc(created_s),
        "labels": changes.pop("labels", {"job-name": job}),
        "annotations": changes.pop("annotations", {}),
    }
    if changes.pop("ending", False):
        metadata["deletionTimestamp"] = utc(NOW_S)
    if owner := changes.pop("owner", ""):
        metadata["ownerReferences"] = [{"kind": owner, "name": "o"}]
    started_s = changes.pop("started_s", [created_s + 1])
    statuses = [{"state": {"running": {"startedAt": utc(time_s)}}} for time_s in started_s]
    status = {"phase": "Running" if on else "Pending", "containerStatuses": statuses if on else [], **changes}
    return msgspec.convert({"metadata": metadata, "spec": {"nodeName": on}, "status": status}, Pod)


class Cluster:
    """Stands where Api stands. What evicts a pod has a controller make another one on the first node that takes it."""

    def __init__(self, nodes: Iterable[str] = ("n1", "n2", "n3"), pods: Iterable[Pod] = ()) -> None:
        self.nodes: dict[str, dict[str, Any]] = {name: msgspec.to_builtins(node(name)) for name in nodes}
        self.there: dict[str, Pod] = {one.metadata.uid: one for one in pods}
        self.kept: dict[str, str] = {}  # pods that a budget keeps, and what it says
        self.evicted: list[str] = []
        self.fails: dict[str, str] = {}  # what is asked for, and how it is refused
        self.conflicts = 0
        self.controller = True
        self.now_s = NOW_S
        self.on_pause: Callable[[], None] = lambda: None
        self.patches = 0
        self.reported: dict[str, str] | None = {}  # the ConfigMap; None: there is none

    def clock(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds
        self.on_pause()

    def close(self) -> None:
        self.fails["everything"] = "closed"

    def _ask(self, what: str) -> None:
        for asked in (what, "everything"):
            if asked in self.fails:
                raise CannotCarryOutError(f"{what}: {self.fails[asked]}")

    def node(self, name: str) -> ClusterNode | None:
        self._ask("get node")
        return msgspec.convert(self.nodes[name], ClusterNode) if name in self.nodes else None

    def node_names(self) -> frozenset[str]:
        self._ask("list nodes")
        return frozenset(self.nodes)

    def pods(
        self, namespaces: Iterable[str], *, label: str | None = None, node: str | None = None, cached: bool = False
    ) -> list[Pod]:
        self._ask("list pods")
        key, _, value = (label or "").partition("=")
        return [
            one
            for one in self.there.values()
            if (not namespaces or one.metadata.namespace in namespaces)
            and (label is None or (one.metadata.labels or {}).get(key) == value)
            and (node is None or one.spec.node_name == node)
        ]

    def mark(self, name: str, patch: dict[str, Any]) -> None:
        self._ask("patch node")
        known = self.nodes[name]
        if self.conflicts > 0 or patch["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
            self.conflicts -= 1
            raise Conflict
        self.patches += 1
        _merge(known, patch)
        known["metadata"]["resourceVersion"] = str(int(known["metadata"]["resourceVersion"]) + 1)

    def set_condition(self, name: str, patch: dict[str, Any]) -> None:
        self._ask("patch nodes/status")
        [new] = patch["status"]["conditions"]
        others = [item for item in self.nodes[name]["status"].get("conditions") or () if item["type"] != new["type"]]
        self.nodes[name]["status"]["conditions"] = [*others, new]

    def set_config_map_key(self, config_map: str, namespace: str, key: str, text: str | None) -> bool:
        self._ask(f"patch configmap {config_map} in {namespace}")
        if self.reported is not None:
            _merge(self.reported, {key: text})
        return self.reported is not None

    def evict(self, one: Pod) -> Eviction:
        self._ask("evict")
        uid = one.metadata.uid
        if uid not in self.there:
            return Eviction(True)
        if why := self.kept.get(one.metadata.name):
            return Eviction(False, why)
        self.evicted.append(one.metadata.name)
        del self.there[uid]
        if self.controller:
            self.replace(one)
        return Eviction(True)

    def replace(self, one: Pod) -> None:
        """A new pod like this one is there, on the first node that takes any."""
        free = [name for name, known in self.nodes.items() if not known["spec"].get("unschedulable")]
        number = len(self.evicted)
        labels = dict(one.metadata.labels or {})
        name = f"{one.metadata.name.partition('+')[0]}+{number}"
        self.add(pod(name, free[0] if free else "", labels=labels, created_s=self.now_s + 1))

    def add(self, one: Pod) -> None:
        self.there[one.metadata.uid] = one

    def condition(self, name: str) -> dict[str, Any]:
        [found] = [item for item in self.nodes[name]["status"]["conditions"] if item["type"] == "EagleEyeFault"]
        return dict(found)


def _merge(known: dict[str, Any], patch: dict[str, Any]) -> None:
    """A merge patch (RFC 7396), as the API server applies it."""
    for key, value in patch.items():
        if value is None:
            known.pop(key, None)
        elif isinstance(value, dict):
            if not isinstance(known.get(key), dict):
                known[key] = {}
            _merge(known[key], value)
        else:
            known[key] = value
