"""What every orchestrator has to be, here for a JobSet: its controller makes all pods anew when one goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable

import pytest

from eagle_eye.orchestrators.kubernetes.api import Eviction
from eagle_eye.orchestrators.kubernetes.objects import Pod
from eagle_eye.orchestrators.kubernetes.orchestrator import KubernetesOrchestrator, Settings
from tests.orchestrators.contract import OrchestratorContract
from tests.orchestrators.kubernetes.builders import Cluster, pod

JOB = "train"


class JobSet(Cluster):
    """Three pods; the first eviction of an attempt ends it, and all of them are made anew with the next number."""

    def __init__(self) -> None:
        super().__init__(nodes=("n1", "n2", "n3", "n4"))
        self.now_s = time.time()
        self.lock = threading.Lock()
        self.start(0)

    def clock(self) -> float:
        return time.time()

    def pause(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.01))

    def start(self, attempt: int) -> None:
        free = [name for name, known in self.nodes.items() if not known["spec"].get("unschedulable")]
        self.there.clear()
        for index, name in enumerate(free[:3]):
            labels = {
                "jobset.sigs.k8s.io/jobset-name": JOB,
                "jobset.sigs.k8s.io/restart-attempt": str(attempt),
                "jobset.sigs.k8s.io/job-index": str(index),
            }
            age_s = 100 if attempt == 0 else -1
            self.add(pod(f"{JOB}-{index}-{attempt}", name, labels=labels, created_s=time.time() - age_s))

    def evict(self, one: Pod) -> Eviction:
        with self.lock:
            if one.metadata.uid in self.there:
                self.start(int((one.metadata.labels or {})["jobset.sigs.k8s.io/restart-attempt"]) + 1)
        return Eviction(True)


class JobSetWorld:
    """The JobSet, and the orchestrator over it."""

    job = JOB
    node = "n2"

    def __init__(self) -> None:
        self.cluster = JobSet()
        self.orchestrator = self.reopened()

    def reopened(self) -> KubernetesOrchestrator:
        cluster = self.cluster
        return KubernetesOrchestrator(cluster, Settings(), None, cluster.clock, cluster.pause)  # type: ignore[arg-type]

    def runs_on(self) -> frozenset[str]:
        return frozenset(one.spec.node_name for one in self.cluster.there.values() if one.runs)

    def out(self) -> frozenset[str]:
        return frozenset(name for name, known in self.cluster.nodes.items() if known["spec"].get("unschedulable"))

    def snapshot(self) -> Hashable:
        return str(self.cluster.nodes), tuple(sorted(self.cluster.there))


class TestContract(OrchestratorContract):
    can_stop = False  # pods come back; what owns them is not ours to change

    @pytest.fixture
    def world(self) -> JobSetWorld:
        return JobSetWorld()
