"""A real API server, controller manager and scheduler: what our verbs do to them, with no more than the role's rights.

It takes a minute, and a control plane that was built before: make test-kubernetes does both. With
EAGLE_EYE_TEST_RECORD set what was said is recorded for the default run (test_recorded.py).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eagle_eye.orchestrators.kubernetes import options
from eagle_eye.orchestrators.kubernetes.api import NAMES_ONLY
from eagle_eye.orchestrators.kubernetes.orchestrator import KubernetesOrchestrator
from eagle_eye.orchestrators.protocol import Exclusion
from eagle_eye.server.jobs.pods import KubernetesNode, node_of
from tests.orchestrators.kubernetes.builders import cause
from tests.orchestrators.kubernetes.cluster import Cluster, missing, started, until
from tests.orchestrators.kubernetes.recording import Answer, Clock, Recording, orchestrator_at, perform, serving
from tests.orchestrators.kubernetes.rights import manifest

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing() or "-"), pytest.mark.slow]

NODES = ("n1", "n2", "n3", "n4")
SPACE = "ml"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    programs = Path(os.environ["EAGLE_EYE_TEST_KUBERNETES"]) / "bin"
    with started(tmp_path_factory.mktemp("cluster"), programs) as cluster:
        for name in NODES:
            cluster.add_node(name)
        cluster.namespace(SPACE)
        cluster.namespace("eagle-eye")
        for document in manifest():
            kind, meta = document["kind"], document["metadata"]
            if kind in ("ClusterRole", "ClusterRoleBinding"):
                cluster.ask("POST", f"/apis/rbac.authorization.k8s.io/v1/{kind.lower()}s", document)
            elif kind == "ServiceAccount":
                cluster.ask("POST", f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts", document)
            else:  # the server finds nothing wrong with what it does not run here
                path = {
                    "PersistentVolumeClaim": "/api/v1/namespaces/eagle-eye/persistentvolumeclaims",
                    "Service": "/api/v1/namespaces/eagle-eye/services",
                    "Deployment": "/apis/apps/v1/namespaces/eagle-eye/deployments",
                }[kind]
                cluster.ask("POST", f"{path}?dryRun=All", document)
        yield cluster


@pytest.fixture
def job(cluster: Cluster) -> Iterator[str]:
    """A plain Job of three pods on three of four nodes; afterwards nothing of it, and all nodes as they were."""
    name = f"train-{time.monotonic_ns() % 100_000}"
    cluster.job(SPACE, name, 3)
    cluster.runs(SPACE, name, 3)
    # Kubernetes' times are whole seconds: a fault reported now concerns pods that began before.
    time.sleep(2)
    yield name
    cluster.dead.clear()
    gone = "?propagationPolicy=Background&gracePeriodSeconds=0"
    cluster.ask("DELETE", f"/apis/batch/v1/namespaces/{SPACE}/jobs/{name}{gone}")
    until(lambda: not cluster.pods(SPACE, f"job-name={name}"), what=f"{name} is gone")
    for node in NODES:
        cluster.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": None, "taints": None},
                                                "metadata": {"annotations": None}})  # fmt: skip


class Reported:
    """What the orchestrator says of each step, with all that went between it and the API server kept."""

    def __init__(self, cluster: Cluster, name: str, account: str = "eagle-eye-orchestrator") -> None:
        self._cluster = cluster
        self._name = name
        self._token = cluster.token_of("eagle-eye", account)
        self.exchanges: list[dict[str, Any]] = []

    def by(self, *steps: Sequence[Any], start_s: float | None = None, **settings: Any) -> list[Any]:
        start_s = float(int(time.time())) if start_s is None else start_s
        clock = Clock(start_s, time.sleep)
        with serving(self.forward) as url, orchestrator_at(url, clock, **settings) as orchestrator:
            said = perform(orchestrator, clock, steps)
        if "EAGLE_EYE_TEST_RECORD" in os.environ:
            version = self._cluster.ask("GET", "/version")["gitVersion"]
            Recording(version, start_s, settings, [list(step) for step in steps], said, self.exchanges).save(self._name)
        return said

    def forward(self, method: str, path: str, body: Any) -> Answer:
        kinds = {"PATCH": "application/merge-patch+json"}
        kind = kinds.get(method, "application/json")
        if path.partition("?")[0].endswith("/status"):
            kind = "application/strategic-merge-patch+json"
        answer = self._cluster.call(method, path, body, kind, self._token)
        said = answer.json()
        self.exchanges.append(
            {"method": method, "path": path, "body": body, "status": answer.status_code, "answer": said}
        )
        return Answer(answer.status_code, said)


def test_an_exclusion_and_a_restart_have_the_jobs_controller_make_its_pods_anew_elsewhere(
    cluster: Cluster, job: str
) -> None:
    before = cluster.running(SPACE, job)
    bad = min(before.values())
    steps: list[list[Any]] = [
        ["state", job],
        ["exclude", job, [bad]],
        ["restart", job, [bad]],
        ["restart", job, [bad]],
        ["state", job],
    ]
    said = Reported(cluster, "exclude_and_restart").by(*steps)
    after = cluster.running(SPACE, job)
    assert said[0] == said[4] == [0, list(NODES), True]
    assert said[1] == f"{bad} is cordoned and tainted eagle-eye/excluded=gpu_lost:NoSchedule"
    assert said[2].startswith(f"evicted 3 pods of {job}; 3 run on ")
    assert said[3].startswith(f"no pod of {job} was there to evict; 3 run on ")
    assert not set(before) & set(after)
    assert (len(after), bad in after.values()) == (3, False)
    node = cluster.node(bad)
    conditions = {item["type"]: item for item in node["status"]["conditions"]}
    assert node["spec"]["unschedulable"] is True
    assert [taint["key"] for taint in node["spec"]["taints"]] == ["eagle-eye/excluded"]
    assert (conditions["EagleEyeFault"]["status"], conditions["EagleEyeFault"]["reason"]) == ("True", "GpuLost")
    assert conditions["Ready"]["status"] == "True"


def test_a_readmitted_node_takes_pods_again(cluster: Cluster, job: str) -> None:
    bad = min(cluster.running(SPACE, job).values())
    said = Reported(cluster, "readmit").by(["exclude", job, [bad]], ["readmit", [bad]], ["readmit", [bad]])
    node = cluster.node(bad)
    assert said[1:] == [f"{bad} takes pods again", f"{bad} is left as it is: not excluded by us"]
    assert "unschedulable" not in node["spec"]
    assert "taints" not in node["spec"]
    assert not any("eagle-eye" in key for key in node["metadata"].get("annotations", {}))
    [condition] = [item for item in node["status"]["conditions"] if item["type"] == "EagleEyeFault"]
    assert (condition["status"], condition["reason"]) == ("False", "Readmitted")


def test_an_administrators_cordon_is_left_as_it_is(cluster: Cluster, job: str) -> None:
    cluster.patch("/api/v1/nodes/n4", {"spec": {"unschedulable": True}}, manager="kubectl-cordon")
    before = cluster.node("n4")
    said = Reported(cluster, "foreign_cordon").by(["exclude", job, ["n4"]], ["readmit", ["n4"]])
    assert said == [
        "n4 is out already, cordoned by somebody else: left as it is",
        "n4 is left as it is: cordoned by somebody else",
    ]
    assert cluster.node("n4")["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


def test_a_node_that_an_administrator_cordons_anew_stays_cordoned(cluster: Cluster, job: str) -> None:
    reported = Reported(cluster, "cordoned_anew")
    # Two recordings in one: what an administrator does in between is no exchange of ours.
    clock = Clock(float(int(time.time())), time.sleep)
    with serving(reported.forward) as url, orchestrator_at(url, clock) as orchestrator:
        perform(orchestrator, clock, [["exclude", job, ["n4"]]])
    reported.exchanges.clear()
    cluster.patch("/api/v1/nodes/n4", {"spec": {"unschedulable": None}}, manager="kubectl-uncordon")
    cluster.patch("/api/v1/nodes/n4", {"spec": {"unschedulable": True}}, manager="kubectl-cordon")
    said = reported.by(["readmit", ["n4"]])
    node = cluster.node("n4")
    assert said == ["n4 has no marks of ours any more; it stays cordoned: cordoned anew by 'kubectl-cordon'"]
    assert node["spec"]["unschedulable"] is True
    assert "taints" not in node["spec"] or "eagle-eye/excluded" not in str(node["spec"]["taints"])


def test_a_disruption_budget_is_respected(cluster: Cluster, job: str) -> None:
    path = f"/apis/policy/v1beta1/namespaces/{SPACE}/poddisruptionbudgets"
    selector = {"matchLabels": {"job-name": job}}
    cluster.ask("POST", path, {"metadata": {"name": "all"}, "spec": {"minAvailable": 3, "selector": selector}})
    try:
        until(lambda: cluster.ask("GET", f"{path}/all").get("status", {}).get("currentHealthy") == 3, what="the budget")
        before = cluster.running(SPACE, job)
        said = Reported(cluster, "disruption_budget").by(["restart", job, []])
        assert said[0].startswith("refused: evicted 0 of 3 pods, the rest not in time: ml/train-")
        assert "violate the pod's disruption budget" in said[0]
        assert cluster.running(SPACE, job) == before
    finally:
        cluster.ask("DELETE", f"{path}/all")


def test_a_budget_of_one_at_a_time_restarts_them_one_at_a_time(cluster: Cluster, job: str) -> None:
    path = f"/apis/policy/v1beta1/namespaces/{SPACE}/poddisruptionbudgets"
    selector = {"matchLabels": {"job-name": job}}
    cluster.ask("POST", path, {"metadata": {"name": "two"}, "spec": {"minAvailable": 2, "selector": selector}})
    try:
        until(lambda: cluster.ask("GET", f"{path}/two").get("status", {}).get("currentHealthy") == 3, what="the budget")
        before = cluster.running(SPACE, job)
        said = Reported(cluster, "budget_of_one").by(["restart", job, []])
        assert said[0].startswith(f"evicted 3 pods of {job}; 3 run on ")
        assert not set(before) & set(cluster.running(SPACE, job))
    finally:
        cluster.ask("DELETE", f"{path}/two")


def test_a_job_that_finds_no_place_fails_with_the_schedulers_word(cluster: Cluster, job: str) -> None:
    bad = sorted(cluster.running(SPACE, job).values())[:2]
    said = Reported(cluster, "no_place").by(["exclude", job, bad], ["restart", job, bad], start_wait_s=6.0)
    assert "does not run again after 6 s (--start-wait): " in said[1]
    assert "0/4 nodes are available" in said[1]


def test_a_node_that_is_dead_does_not_keep_the_job_from_running_elsewhere(cluster: Cluster, job: str) -> None:
    bad = min(cluster.running(SPACE, job).values())
    cluster.dead.add(bad)
    said = Reported(cluster, "dead_node").by(["exclude", job, [bad]], ["restart", job, [bad]])
    assert said[1].startswith(f"evicted 3 pods of {job}; 3 run on ")


def test_bystanders_on_the_node_stay(cluster: Cluster, job: str) -> None:
    bad = min(cluster.running(SPACE, job).values())
    other = {
        "metadata": {"name": "other"},
        "spec": {"nodeName": bad, "automountServiceAccountToken": False, "terminationGracePeriodSeconds": 0,
                 "containers": [{"name": "c", "image": "none"}]},
    }  # fmt: skip
    cluster.ask("POST", f"/api/v1/namespaces/{SPACE}/pods", other)
    try:
        said = Reported(cluster, "bystander").by(["exclude", job, [bad]], ["restart", job, [bad]])
        assert said[0].endswith("; others on it stay: ml/other")
        assert "deletionTimestamp" not in cluster.ask("GET", f"/api/v1/namespaces/{SPACE}/pods/other")["metadata"]
    finally:
        cluster.ask("DELETE", f"/api/v1/namespaces/{SPACE}/pods/other?gracePeriodSeconds=0")


def test_a_restart_that_a_killed_process_left_half_done_is_finished_and_not_repeated(
    cluster: Cluster, job: str
) -> None:
    reported_of_s = float(int(time.time()))
    before = sorted(cluster.running(SPACE, job))
    eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": before[0], "namespace": SPACE}}
    cluster.ask("POST", f"/api/v1/namespaces/{SPACE}/pods/{before[0]}/eviction", eviction)
    # Three run again, without the one that was evicted.
    until(lambda: before[0] not in cluster.running(SPACE, job), what="the first one is gone")
    [successor] = set(cluster.runs(SPACE, job, 3)) - set(before)
    said = Reported(cluster, "half_done").by(["restart", job, []], start_s=reported_of_s)
    after = cluster.running(SPACE, job)
    assert said[0].startswith(f"evicted 2 pods of {job}; 3 run on ")
    assert successor in after
    assert not set(after) & set(before)


def test_the_service_account_may_do_what_the_role_says_and_nothing_else(cluster: Cluster) -> None:
    token = cluster.token_of("eagle-eye", "eagle-eye-orchestrator")

    def status(method: str, path: str, body: Any = None) -> int:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        found: int = cluster.call(method, path, body, kind, token).status_code
        return found

    assert status("GET", "/api/v1/pods") == 200
    assert status("GET", "/api/v1/nodes/n1") == 200
    refused = {
        path: status(method, path, body)
        for method, path, body in (
            ("GET", f"/api/v1/namespaces/{SPACE}/pods/x", None),
            ("DELETE", f"/api/v1/namespaces/{SPACE}/pods/x", None),
            ("DELETE", f"/api/v1/namespaces/{SPACE}/pods", None),
            ("DELETE", "/api/v1/nodes/n1", None),
            ("GET", "/api/v1/secrets", None),
            ("GET", f"/apis/batch/v1/namespaces/{SPACE}/jobs", None),
            ("PATCH", f"/apis/batch/v1/namespaces/{SPACE}/jobs/x", {"spec": {}}),
            ("POST", f"/api/v1/namespaces/{SPACE}/pods/x/exec?command=sh", None),
            ("GET", "/api/v1/pods?watch=1", None),
        )
    }
    assert set(refused.values()) == {403}, refused


def test_a_missing_right_is_named(cluster: Cluster, job: str) -> None:
    cluster.ask("POST", "/api/v1/namespaces/eagle-eye/serviceaccounts", {"metadata": {"name": "nobody"}})
    said = Reported(cluster, "no_rights", "nobody").by(["state", job], ["exclude", job, ["n1"]])
    assert said[0].startswith("refused: list pods: the API server answers 403: pods is forbidden: User ")
    assert said[1].endswith("; see docs/how-to/kubernetes.md, Rights")


def test_a_list_of_names_leaves_the_rest_of_each_node_out(cluster: Cluster) -> None:
    answer = cluster.call("GET", "/api/v1/nodes", accept=NAMES_ONLY).json()
    assert answer["kind"] == "PartialObjectMetadataList"
    assert all("spec" not in item and "status" not in item for item in answer["items"])


def test_a_kubeconfig_leads_to_the_cluster(cluster: Cluster, job: str, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    options.add_options(parser)
    token = cluster.token_of("eagle-eye", "eagle-eye-orchestrator")
    file = cluster.kubeconfig(tmp_path / "config", token)
    made = options.build(parser.parse_args([f"--kubeconfig={file}", f"--namespace={SPACE}"]))
    assert isinstance(made, KubernetesOrchestrator)
    with contextlib.closing(made):
        state = made.state(job)
        assert state is not None
        assert (state.running, set(state.nodes)) == (True, set(NODES))
        made.exclude(Exclusion(job, 0, ("n4",), False, cause()))
        assert cluster.node("n4")["spec"]["unschedulable"] is True
        assert made.readmit(["n4"]) == "n4 takes pods again"


def test_the_server_of_eagle_eye_takes_our_cordon_for_ours(cluster: Cluster, job: str) -> None:
    Reported(cluster, "ours").by(["exclude", job, ["n4"]])
    seen = node_of(msgspec.convert(cluster.node("n4"), KubernetesNode, strict=False))
    assert (seen.state, seen.reason) == ("draining", "eagle-eye: cordoned")
