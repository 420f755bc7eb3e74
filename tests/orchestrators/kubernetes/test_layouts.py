"""Jobs that follow a plan where no node is free: an Indexed Job in memory, other kinds by their objects."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from eagle_eye.orchestrators.kubernetes import options
from eagle_eye.orchestrators.kubernetes.api import (
    KINDS,
    LAYOUT,
    Conflict,
    Eviction,
    Ref,
    ScaleChange,
    gpus_of,
    made_by,
    read,
    resized,
)
from eagle_eye.orchestrators.kubernetes.objects import Pod
from eagle_eye.orchestrators.kubernetes.orchestrator import KubernetesOrchestrator, Settings
from eagle_eye.orchestrators.protocol import CannotCarryOutError, Exclusion, OrchestratorError, Restart
from eagle_eye.planning.plan import LAYOUT_VARIABLE, Plan, variable
from tests.docs.pages import blocks
from tests.orchestrators.kubernetes.builders import NOW_S, Cluster, _merge, cause, pod
from tests.orchestrators.kubernetes.recording import Answer, api_at, serving
from tests.planning.jobs import plan

INDEX = "batch.kubernetes.io/job-completion-index"
FOUR = plan(4, job="train")  # two nodes hold the model
LEFT = FOUR.layout(4).step_s / FOUR.layout(3).step_s
THREE_LEFT = f"no spare: 3 nodes by plan, {LEFT:.0%} of the samples/s of 4"
MANIFEST = Path(__file__).parents[3] / "packaging" / "kubernetes" / "layouts.yaml"


class IndexedJob(Cluster):
    """A Job whose controller and scheduler work whenever time passes; a node has room for one pod.

    A pod's annotation "layout" is what its container found in the ConfigMap as it started.
    """

    def __init__(self, *nodes: str) -> None:
        super().__init__(nodes=nodes)
        self.reported = {"train": variable(FOUR, 4)}
        self.body: dict[str, Any] = {
            "metadata": {"resourceVersion": "1"},
            "spec": {"completionMode": "Indexed", "parallelism": 4, "completions": 4},
        }
        self.made = 0
        self.work(age_s=1_000)

    def pause(self, seconds: float) -> None:
        super().pause(seconds)
        self.work()

    def evict(self, one: Pod) -> Eviction:
        self._ask("evict")
        if self.there.pop(one.metadata.uid, None) is not None:
            self.evicted.append(one.metadata.name)
        return Eviction(True)

    def workload(self, ref: Ref) -> dict[str, Any]:
        self._ask("get workload")
        return msgspec.json.decode(msgspec.json.encode(self.body), type=dict[str, Any])

    def change_workload(self, ref: Ref, patch: dict[str, Any]) -> None:
        self._ask("patch workload")
        version = self.body["metadata"]["resourceVersion"]
        if patch["metadata"]["resourceVersion"] != version:
            raise Conflict
        _merge(self.body, patch)
        self.body["metadata"]["resourceVersion"] = str(int(version) + 1)

    def work(self, age_s: float = 0.0) -> None:
        wanted = {str(index) for index in range(self.body["spec"]["completions"])}
        self.there = {uid: one for uid, one in self.there.items() if self.index(one) in wanted}
        for index in sorted(wanted - {self.index(one) for one in self.there.values()}):
            self.made += 1
            self.add(self.pod(index, f"train-{index}-{self.made}", "", self.now_s - age_s))
        for one in [one for one in self.there.values() if not one.spec.node_name]:
            busy = {other.spec.node_name for other in self.there.values()}
            free = [
                name
                for name, known in self.nodes.items()
                if name not in busy and not known["spec"].get("unschedulable")
            ]
            if free:
                created_s = one.metadata.creation_timestamp.timestamp()  # type: ignore[union-attr]
                self.add(self.pod(self.index(one), one.metadata.name, free[0], created_s))

    def pod(self, index: str, name: str, on: str, created_s: float) -> Pod:
        homeless = [{"type": "PodScheduled", "status": "False", "message": "0/4 nodes are available"}]
        return pod(
            name, on, labels={"job-name": "train", INDEX: index}, owner="Job", created_s=created_s,
            annotations={"layout": (self.reported or {}).get("train", "")}, conditions=[] if on else homeless,
        )  # fmt: skip

    @staticmethod
    def index(one: Pod) -> str:
        return (one.metadata.labels or {})[INDEX]

    @property
    def layouts(self) -> set[str]:
        """What the pods that run were told."""
        return {(one.metadata.annotations or {})["layout"] for one in self.there.values() if one.runs}

    @property
    def size(self) -> tuple[int, int]:
        return self.body["spec"]["parallelism"], self.body["spec"]["completions"]


def over(cluster: Cluster, followed: Plan = FOUR, **changes: Any) -> KubernetesOrchestrator:
    settings = Settings(plans={"train": followed}, layout_config_map="layouts", start_wait_s=120.0, **changes)
    return KubernetesOrchestrator(cluster, settings, None, cluster.clock, cluster.pause)  # type: ignore[arg-type]


def loses(cluster: Cluster, *nodes: str, **changes: Any) -> str:
    """What is reported of the restart without the nodes."""
    ours = over(cluster, **changes)
    ours.exclude(Exclusion("train", 0, nodes, True, cause()))
    return ours.restart("train", Restart(0, None, cause(), nodes))


def test_without_a_free_node_the_job_goes_on_with_fewer_pods_that_are_told_their_layout() -> None:
    cluster = IndexedJob("n1", "n2", "n3", "n4")
    assert loses(cluster, "n2") == f"evicted 4 pods of train; {THREE_LEFT}; 3 run on n1, n3, n4"
    assert cluster.size == (3, 3)
    assert cluster.layouts == {variable(FOUR, 3)}


def test_a_spare_node_is_taken_and_nothing_of_the_job_is_changed() -> None:
    cluster = IndexedJob("n1", "n2", "n3", "n4", "n5")
    before = str(cluster.body)
    assert loses(cluster, "n2") == "evicted 4 pods of train; 4 run on n1, n3, n4, n5"
    assert (str(cluster.body), cluster.layouts) == (before, {variable(FOUR, 4)})


def test_a_node_that_comes_while_a_spare_is_waited_for_is_taken() -> None:
    cluster = IndexedJob("n1", "n2", "n3", "n4", "n5")
    cluster.nodes["n5"]["spec"]["unschedulable"] = True

    def comes() -> None:
        if cluster.now_s > NOW_S + 40:
            cluster.nodes["n5"]["spec"]["unschedulable"] = False

    cluster.on_pause = comes
    assert loses(cluster, "n2") == "evicted 4 pods of train; 4 run on n1, n3, n4, n5"
    assert cluster.size == (4, 4)


def test_below_what_the_plan_covers_the_job_waits_for_a_spare_and_the_report_says_so() -> None:
    cluster = IndexedJob("n1", "n2", "n3", "n4")
    why = r"after 120 s .*; 1 of its pods have a node, and its plan's layouts need 2: it waits for a spare$"
    with pytest.raises(CannotCarryOutError, match=why):
        loses(cluster, "n2", "n3", "n4")
    assert cluster.size == (4, 4)


def test_the_next_restart_gives_the_job_all_of_its_pods_again() -> None:
    cluster = IndexedJob("n1", "n2", "n3", "n4")
    loses(cluster, "n2")
    assert LAYOUT in cluster.body["metadata"]["annotations"]
    over(cluster).readmit(["n2"])
    later = cause("act-2", "inc-2", detected_s=cluster.now_s + 10)
    assert over(cluster).restart("train", Restart(0, None, later)).endswith("; 4 run on n1, n2, n3, n4")
    assert (cluster.size, cluster.layouts) == ((4, 4), {variable(FOUR, 4)})
    assert LAYOUT not in cluster.body["metadata"]["annotations"]


def test_a_process_killed_after_the_resize_leaves_no_pod_with_the_layout_before() -> None:
    cluster = IndexedJob("n1", "n2", "n3", "n4")
    change = cluster.change_workload

    def dies(ref: Ref, patch: dict[str, Any]) -> None:
        change(ref, patch)
        cluster.fails["everything"] = "killed"

    cluster.change_workload = dies  # type: ignore[method-assign]
    with pytest.raises(CannotCarryOutError, match="killed"):
        loses(cluster, "n2")
    cluster.fails.clear()
    cluster.change_workload = change  # type: ignore[method-assign]
    cluster.work()
    assert variable(FOUR, 4) in cluster.layouts
    assert loses(cluster, "n2").endswith("3 run on n1, n3, n4")
    assert (cluster.size, cluster.layouts) == ((3, 3), {variable(FOUR, 3)})


def missing(cluster: IndexedJob) -> str:
    cluster.reported = None
    return "there is no ConfigMap layouts in ml to tell its pods of it"


def forbidden(cluster: IndexedJob) -> str:
    cluster.fails["patch workload"] = "forbidden"
    return "patch workload: forbidden"


def rigid(cluster: IndexedJob) -> str:
    cluster.body["spec"]["completionMode"] = "NonIndexed"
    return "Job ml/o has no elastic size: it must be Indexed, with as many completions as parallelism"


@pytest.mark.parametrize("prepare", [missing, forbidden, rigid])
def test_a_job_that_cannot_have_fewer_pods_waits_for_a_node_and_the_report_says_why(prepare: Any) -> None:
    cluster = IndexedJob("n1", "n2", "n3", "n4")
    why = prepare(cluster)
    with pytest.raises(CannotCarryOutError) as failed:
        loses(cluster, "n2")
    assert str(failed.value).endswith(f"; train has a plan for fewer nodes and cannot follow it: {why}")
    assert cluster.size == (4, 4)
    assert cluster.reported in (None, {"train": variable(FOUR, 4)})


def test_a_plan_for_other_hardware_or_fewer_nodes_is_not_followed_and_said_so() -> None:
    cluster = IndexedJob("n1", "n2", "n3", "n4")
    with pytest.raises(CannotCarryOutError, match="has layouts for 2 to 3 nodes, and the job wants 4; plan again"):
        loses(cluster, "n2", followed=plan(3, job="train"))
    limits = {"nvidia.com/gpu": "8"}
    spec = {"nodeName": "n1", "containers": [{"resources": {"limits": limits}}, {"resources": {}}]}
    eight = msgspec.convert({"spec": spec}, Pod)
    assert (gpus_of([eight, eight]), gpus_of([pod("a")]), gpus_of([eight, pod("a")])) == (8, None, None)


def indexed(pods: int, **changes: Any) -> dict[str, Any]:
    return {"completionMode": "Indexed", "parallelism": pods, "completions": pods, **changes}


def jobset(*jobs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"replicatedJobs": [{"name": "w", "template": {"spec": job}, **changes} for job in jobs]}


def pytorch_job(replicas: int = 4, policy: Any = None, **others: Any) -> dict[str, Any]:
    worker = {"replicas": replicas, "template": {}}
    return {"elasticPolicy": policy, "pytorchReplicaSpecs": {"Worker": worker, **others}}


ELASTIC = {"minReplicas": 2, "maxReplicas": 4}


def workload(kind: str, spec: dict[str, Any]) -> Any:
    return read(Ref(kind, "ml", "train"), {"metadata": {"resourceVersion": "7"}, "spec": spec})


@pytest.mark.parametrize(
    ("kind", "spec", "after"),
    [
        ("Job", indexed(4), {"parallelism": 3, "completions": 3}),
        ("JobSet", jobset(indexed(4, backoffLimit=0)), jobset(indexed(3, backoffLimit=0))),
        ("PyTorchJob", pytorch_job(4, ELASTIC), {"pytorchReplicaSpecs": {"Worker": {"replicas": 3}}}),
    ],
)
def test_each_kind_is_resized_by_its_own_fields(kind: str, spec: dict[str, Any], after: dict[str, Any]) -> None:
    before = workload(kind, spec)
    patch = resized(before, ScaleChange(4, 3, 1_800_000_000, "act-1"))
    assert patch["spec"] == after
    assert patch["metadata"]["resourceVersion"] == "7"
    note = {"wanted": 4, "pods": 3, "since_s": 1_800_000_000, "action": "act-1"}
    assert msgspec.json.decode(patch["metadata"]["annotations"][LAYOUT]) == note
    assert resized(before, ScaleChange(4, 4, 1, "act-2"))["metadata"]["annotations"] == {LAYOUT: None}


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("Job", {"parallelism": 4, "completions": 4}),
        ("Job", indexed(4, parallelism=2)),
        ("Job", {"completionMode": "Indexed", "parallelism": 4}),
        ("JobSet", jobset(indexed(4), indexed(1))),
        ("JobSet", jobset(indexed(4), replicas=2)),
        ("JobSet", {"replicatedJobs": []}),
        ("PyTorchJob", pytorch_job(4)),
        ("PyTorchJob", pytorch_job(4, ELASTIC, Master={"replicas": 1})),
    ],
)
def test_what_has_no_elastic_size_is_said_so(kind: str, spec: dict[str, Any]) -> None:
    with pytest.raises(CannotCarryOutError, match=f"^{kind} ml/train has no elastic size: it must be "):
        workload(kind, spec)


def test_an_elastic_policy_is_kept() -> None:
    with pytest.raises(CannotCarryOutError, match="its elasticPolicy has 2 to 4 replicas, not 1"):
        resized(workload("PyTorchJob", pytorch_job(4, ELASTIC)), ScaleChange(4, 1, 0, "act-1"))


def test_a_size_that_somebody_has_given_it_since_is_its_own() -> None:
    note = '{"wanted": 4, "pods": 3, "since_s": 1, "action": "act-1"}'
    body = {"metadata": {"resourceVersion": "7", "annotations": {LAYOUT: note}}, "spec": indexed(2)}
    assert read(Ref("Job", "ml", "train"), body).wanted == 2
    assert read(Ref("Job", "ml", "train"), {**body, "spec": indexed(3)}).wanted == 4


def test_the_maker_of_pods_is_their_jobset_before_its_jobs_and_one_alone() -> None:
    labels = {"jobset.sigs.k8s.io/jobset-name": "train"}
    assert made_by([pod("a", labels=labels, owner="Job")]) == Ref("JobSet", "ml", "train")
    with pytest.raises(CannotCarryOutError, match="a LeaderWorkerSet, which has no elastic size; Job, JobSet, PyTor"):
        made_by([pod("a", owner="LeaderWorkerSet")])
    with pytest.raises(CannotCarryOutError, match="made by 2 objects"):
        made_by([pod("a", owner="Job"), pod("b", labels=labels, owner="Job")])


def test_plans_need_a_config_map_by_which_pods_learn_their_layout(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    options.add_options(parser)
    file = tmp_path / "plan.json"
    file.write_bytes(msgspec.json.encode(FOUR))
    with pytest.raises(OrchestratorError, match=r"^--layouts: pods learn .*: give --layout-config-map$"):
        options.build(parser.parse_args([f"--layouts={file}"]))
    words = [f"--layouts={file}", "--layout-config-map=layouts", "--spare-wait=600"]
    with pytest.raises(OrchestratorError, match=r"^--spare-wait 600: expected less than --start-wait, 600"):
        options.build(parser.parse_args(words))


def documents() -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))}


def test_the_manifest_grants_exactly_what_a_resize_asks_for() -> None:
    asked: set[tuple[str, str, str]] = set()

    def answer(method: str, path: str, _: Any) -> Answer:
        words = path.partition("?")[0].strip("/").split("/")
        group = "" if words[0] == "api" else words[1]
        asked.add(({"GET": "get", "PATCH": "patch"}[method], group, words[words.index("namespaces") + 2]))
        return Answer(200, {})

    with serving(answer) as url:
        api = api_at(url)
        api.set_config_map_key("eagle-eye-layouts", "ml", "train", "{}")
        for kind in KINDS:
            api.workload(Ref(kind, "ml", "train"))
            api.change_workload(Ref(kind, "ml", "train"), {"spec": {}})
        api.close()
    granted = {
        (verb, group, resource)
        for rule in documents()["Role"]["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert asked == granted


def test_an_object_that_has_changed_since_it_was_read_is_a_conflict() -> None:
    with serving(lambda *_: Answer(409, {"message": "the object has been modified"})) as url:
        api = api_at(url)
        with pytest.raises(Conflict):
            api.change_workload(Ref("Job", "ml", "train"), {"spec": {}})
        api.close()


def test_pods_read_their_layout_where_the_manual_says() -> None:
    (block,) = (one for one in blocks("docs/how-to/kubernetes.md") if one.mark.endswith("kubernetes/test_layouts.py"))
    (given,) = yaml.safe_load(block.text)["env"]
    assert given["name"] == LAYOUT_VARIABLE
    reference = {"name": documents()["ConfigMap"]["metadata"]["name"], "key": "JOB", "optional": True}
    assert given["valueFrom"] == {"configMapKeyRef": reference}
