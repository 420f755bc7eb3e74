"""What becomes of a cluster: by its verbs, on an API server in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from eagle_eye.orchestrators.kubernetes.api import Eviction
from eagle_eye.orchestrators.kubernetes.objects import Pod
from eagle_eye.orchestrators.kubernetes.orchestrator import KubernetesOrchestrator, Settings
from eagle_eye.orchestrators.protocol import CannotCarryOutError, Exclusion, JobState, Restart
from tests.orchestrators.kubernetes.builders import NOW_S, Cluster, cause, pod


def three_pods() -> Cluster:
    return Cluster(pods=[pod("a", "n1"), pod("b", "n2"), pod("c", "n3")])


def over(cluster: Cluster, **changes: object) -> KubernetesOrchestrator:
    settings = Settings(**changes)  # type: ignore[arg-type]
    return KubernetesOrchestrator(cluster, settings, None, cluster.clock, cluster.pause)  # type: ignore[arg-type]


def exclusion(*nodes: str, action: str = "act-1", incident: str = "inc-1", now: bool = True) -> Exclusion:
    return Exclusion("train", 0, nodes or ("n2",), now, cause(action, incident))


def restart(*without: str, over_attempt: int = 0, **changes: object) -> Restart:
    return Restart(over_attempt, None, cause(**changes), without)  # type: ignore[arg-type]


def test_a_job_is_known_by_its_pods() -> None:
    state = over(three_pods()).state("train")
    assert state == JobState(0, frozenset({"n1", "n2", "n3"}), running=True)


def test_a_job_without_pods_is_not_ours() -> None:
    assert over(three_pods()).state("other") is None


def test_a_node_that_runs_no_job_is_cordoned() -> None:
    cluster = three_pods()
    assert over(cluster).state("") == JobState(0, frozenset({"n1", "n2", "n3"}), running=False)
    said = over(cluster).exclude(Exclusion("", 0, ("n2",), False, cause("act-1", "inc-1")))
    assert said.startswith("n2 is cordoned and tainted")
    assert cluster.nodes["n2"]["spec"]["unschedulable"] is True


def test_pods_of_other_namespaces_are_not_looked_at() -> None:
    assert over(three_pods(), namespaces=("dev",)).state("train") is None


def test_a_cluster_that_does_not_answer_is_not_a_job_that_is_gone() -> None:
    cluster = three_pods()
    cluster.fails["list pods"] = "the API server does not answer"
    with pytest.raises(CannotCarryOutError, match="does not answer"):
        over(cluster).state("train")


def test_an_excluded_node_takes_no_pods_and_says_why() -> None:
    cluster = three_pods()
    said = over(cluster).exclude(exclusion())
    spec = cluster.nodes["n2"]["spec"]
    assert said == "n2 is cordoned and tainted eagle-eye/excluded=gpu_lost:NoSchedule"
    assert spec["unschedulable"] is True
    assert [taint["effect"] for taint in spec["taints"]] == ["NoSchedule"]
    condition = cluster.condition("n2")
    assert (condition["status"], condition["reason"]) == ("True", "GpuLost")
    assert condition["message"] == "gpu_lost: XID 79 on GPU 3 (incident inc-1)"


def test_an_exclusion_evicts_nobody_and_names_the_bystanders() -> None:
    cluster = three_pods()
    cluster.add(pod("other-0", "n2", job="other"))
    said = over(cluster).exclude(exclusion())
    assert cluster.evicted == []
    assert said.endswith("; others on it stay: ml/other-0")


def test_the_same_exclusion_again_changes_nothing() -> None:
    cluster = three_pods()
    orchestrator = over(cluster)
    orchestrator.exclude(exclusion())
    before = str(cluster.nodes)
    assert orchestrator.exclude(exclusion()) == "n2 is cordoned already, for incident inc-1"
    assert (str(cluster.nodes), cluster.patches) == (before, 1)


def test_a_condition_that_a_killed_process_left_out_is_made_up_for() -> None:
    cluster = three_pods()
    cluster.fails["patch nodes/status"] = "killed"
    assert "its condition was not set: patch nodes/status: killed" in over(cluster).exclude(exclusion())
    cluster.fails.clear()
    over(cluster).exclude(exclusion())
    assert cluster.condition("n2")["status"] == "True"


def test_a_second_incident_leaves_the_firsts_marks() -> None:
    cluster = three_pods()
    over(cluster).exclude(exclusion())
    assert "for incident inc-1" in over(cluster).exclude(exclusion(action="act-2", incident="inc-2"))
    assert cluster.patches == 1


def test_an_administrators_cordon_is_left_as_it_is() -> None:
    cluster = three_pods()
    cluster.nodes["n2"]["spec"]["unschedulable"] = True
    before = str(cluster.nodes)
    said = over(cluster).exclude(exclusion())
    assert said == "n2 is out already, cordoned by somebody else: left as it is"
    assert over(cluster).readmit(["n2"]) == "n2 is left as it is: cordoned by somebody else"
    assert str(cluster.nodes) == before


def test_an_exclusion_meets_a_node_that_changes_all_the_time() -> None:
    cluster = three_pods()
    cluster.conflicts = 2
    over(cluster).exclude(exclusion())
    assert cluster.nodes["n2"]["spec"]["unschedulable"] is True
    cluster.conflicts = 99
    with pytest.raises(CannotCarryOutError, match="changed by others 5 times"):
        over(cluster).exclude(exclusion("n3"))


def test_a_failure_says_which_nodes_were_excluded_before() -> None:
    cluster = three_pods()
    cluster.fails["patch node"] = "forbidden"
    orchestrator = over(cluster)
    with pytest.raises(CannotCarryOutError, match=r"^n9 is no node of the cluster any more; patch node: forbidden$"):
        orchestrator.exclude(exclusion("n9", "n2"))


def test_a_readmitted_node_is_as_it_was_before() -> None:
    cluster = three_pods()
    before = {key: value for key, value in cluster.nodes["n2"]["spec"].items() if value}
    orchestrator = over(cluster)
    orchestrator.exclude(exclusion())
    assert orchestrator.readmit(["n2"]) == "n2 takes pods again"
    assert {key: value for key, value in cluster.nodes["n2"]["spec"].items() if value} == before
    assert not cluster.nodes["n2"]["metadata"]["annotations"]
    assert cluster.condition("n2")["status"] == "False"


def test_readmission_leaves_what_it_does_not_know() -> None:
    assert over(three_pods()).readmit(["n1", "n9"]) == (
        "n1 is left as it is: not excluded by us; n9 is no node of the cluster"
    )


def test_a_node_that_was_cordoned_anew_loses_our_marks_and_stays_cordoned() -> None:
    cluster = three_pods()
    over(cluster).exclude(exclusion())
    fields: dict[str, dict[str, object]] = {"f:spec": {"f:unschedulable": {}}}
    cluster.nodes["n2"]["metadata"]["managedFields"] = [{"manager": "kubectl", "fieldsV1": fields}]
    said = over(cluster).readmit(["n2"])
    assert said == "n2 has no marks of ours any more; it stays cordoned: cordoned anew by 'kubectl'"
    assert cluster.nodes["n2"]["spec"]["unschedulable"] is True
    assert not cluster.nodes["n2"]["metadata"]["annotations"]


def test_a_node_whose_taint_was_changed_is_left_as_it_is() -> None:
    cluster = three_pods()
    over(cluster).exclude(exclusion())
    cluster.nodes["n2"]["spec"]["taints"][0]["effect"] = "NoExecute"
    before = str(cluster.nodes)
    assert "its taint eagle-eye/excluded was changed" in over(cluster).readmit(["n2"])
    assert str(cluster.nodes) == before


def test_a_lifted_cordon_may_be_put_on_again_by_another_incident() -> None:
    cluster = three_pods()
    over(cluster).exclude(exclusion())
    cluster.nodes["n2"]["spec"]["unschedulable"] = False
    over(cluster).exclude(exclusion(action="act-2", incident="inc-2"))
    assert cluster.nodes["n2"]["spec"]["unschedulable"] is True
    assert len(cluster.nodes["n2"]["spec"]["taints"]) == 1


def test_a_restart_without_a_node_moves_the_whole_job_off_it() -> None:
    cluster = three_pods()
    orchestrator = over(cluster)
    orchestrator.exclude(exclusion())
    said = orchestrator.restart("train", restart("n2"))
    assert cluster.evicted == ["b", "a", "c"]
    assert "n2" not in {one.spec.node_name for one in cluster.there.values()}
    assert said == "evicted 3 pods of train; 3 run on n1"


def test_no_other_jobs_pod_is_ever_evicted() -> None:
    cluster = three_pods()
    cluster.add(pod("other-0", "n2", job="other"))
    over(cluster).restart("train", restart("n2"))
    assert "other-0" not in cluster.evicted


def test_a_restart_that_is_asked_for_twice_happens_once() -> None:
    cluster = three_pods()
    over(cluster).restart("train", restart())
    evicted = list(cluster.evicted)
    said = over(cluster).restart("train", restart())
    assert (cluster.evicted, said) == (evicted, "no pod of train was there to evict; 3 run on n1")


def test_a_restart_goes_on_where_a_killed_process_left_it() -> None:
    cluster = three_pods()
    cluster.fails["everything"] = ""
    cluster.fails.clear()
    first = next(iter(cluster.there.values()))
    cluster.evict(first)
    over(cluster).restart("train", restart())
    assert cluster.evicted == ["a", "b", "c"]


def test_a_job_that_is_further_already_is_not_restarted() -> None:
    labels = {"jobset.sigs.k8s.io/jobset-name": "train", "jobset.sigs.k8s.io/restart-attempt": "2"}
    cluster = Cluster(pods=[pod("a", "n1", labels=labels)])
    said = over(cluster).restart("train", restart(over_attempt=1))
    assert (cluster.evicted, said) == ([], "job train is at attempt 2 already; 1 run on n1")


def test_a_disruption_budget_is_waited_for() -> None:
    cluster = three_pods()
    cluster.kept = {"c": "Cannot evict pod as it would violate the pod's disruption budget."}
    reported: list[str] = []

    def relent() -> None:
        if cluster.now_s > NOW_S + 60:
            cluster.kept.clear()

    cluster.on_pause = relent
    over(cluster).restart("train", restart(tell=reported.append))
    assert cluster.evicted == ["a", "b", "c"]
    assert reported[0].startswith("ml/c may not be evicted yet: Cannot evict pod")
    assert len(reported) == len(set(reported))


def test_a_disruption_budget_that_never_relents_fails_the_action_when_it_expires() -> None:
    cluster = three_pods()
    cluster.kept = dict.fromkeys("abc", "the budget needs 3 healthy pods and has 3 currently")
    with pytest.raises(CannotCarryOutError) as failed:
        over(cluster).restart("train", restart("n2", expires_s=NOW_S + 100))
    assert str(failed.value).startswith("evicted 0 of 3 pods, the rest not in time: ml/b may not be evicted yet")
    assert str(failed.value).endswith("; cordoned all the same: n2")
    assert cluster.evicted == []
    assert NOW_S + 90 <= cluster.now_s <= NOW_S + 100


def test_an_eviction_that_fails_says_how_far_it_has_come() -> None:
    cluster = three_pods()
    cluster.kept = {"a": "kept"}
    real = cluster.evict

    def evict(one: object) -> object:
        if getattr(one, "metadata").name == "c":  # noqa: B009 - it is a pod
            cluster.fails["evict"] = "forbidden"
        return real(one)  # type: ignore[arg-type]

    cluster.evict = evict  # type: ignore[assignment, method-assign]
    with pytest.raises(CannotCarryOutError, match=r"forbidden; evicted before: 1 of 3 pods"):
        over(cluster).restart("train", restart())


def test_a_job_that_finds_no_place_fails_with_the_schedulers_word() -> None:
    cluster = three_pods()
    cluster.controller = False
    why = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 Insufficient gpu."}]
    cluster.on_pause = lambda: cluster.add(pod("d", conditions=why))
    with pytest.raises(CannotCarryOutError, match=r"again after 30 s \(--start-wait\).*0/3 nodes are available"):
        over(cluster, start_wait_s=30.0).restart("train", restart())


def test_checkpoints_that_may_hold_the_damage_are_reported() -> None:
    cluster = three_pods()
    said = over(cluster).restart("train", Restart(0, NOW_S - 30, cause()))
    assert said.endswith(
        "; checkpoints written since 2027-01-15T07:59:30Z may hold the damage, and the job is not told"
    )


def suspect(**changes: object) -> Restart:
    """A restart after damage, from the step before it."""
    return replace(restart(**changes), distrust_since_s=NOW_S - 30, resume_from="memory:40")  # type: ignore[arg-type]


def test_pods_that_are_made_anew_find_where_to_resume_and_those_after_them_do_not() -> None:
    cluster = three_pods()
    found: list[object] = []
    real = cluster.evict

    def evict(one: Pod) -> Eviction:
        found.append(dict(cluster.reported or {}))
        return real(one)

    cluster.evict = evict  # type: ignore[method-assign]
    said = over(cluster, resume_config_map="resume").restart("train", suspect())
    assert found == [{"train": "memory:40"}] * 3
    assert cluster.reported == {}
    assert said.endswith("may hold the damage, and the job is told to resume from memory:40")


def test_what_an_action_that_failed_has_told_is_said_and_taken_back_by_the_next_restart() -> None:
    cluster = three_pods()
    cluster.controller = False
    ours = over(cluster, resume_config_map="resume", start_wait_s=30.0)
    with pytest.raises(CannotCarryOutError, match=r"its pods are still told to resume from memory:40$"):
        ours.restart("train", suspect())
    assert cluster.reported == {"train": "memory:40"}
    cluster.add(pod("d", "n1", created_s=NOW_S + 30))
    ours.restart("train", restart())
    assert cluster.reported == {}


def no_option(_: Cluster) -> str:
    return ""


def no_config_map(cluster: Cluster) -> str:
    cluster.reported = None
    return "resume"


def no_right(cluster: Cluster) -> str:
    cluster.fails["patch configmap resume in ml"] = "forbidden"
    return "resume"


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (no_option, "no --resume-config-map"),
        (no_config_map, "there is no ConfigMap resume in ml"),
        (no_right, "patch configmap resume in ml: forbidden"),
    ],
)
def test_a_job_that_cannot_be_told_where_to_resume_is_restarted_all_the_same(
    prepare: Callable[[Cluster], str], why: str
) -> None:
    cluster = three_pods()
    said = over(cluster, resume_config_map=prepare(cluster)).restart("train", suspect())
    assert cluster.evicted == ["a", "b", "c"]
    assert said.endswith(f"and the job is not told to resume from memory:40: {why}")


def test_what_cannot_be_taken_back_is_reported() -> None:
    cluster = three_pods()
    ours = over(cluster, resume_config_map="resume")
    real = cluster.evict

    def evict(one: Pod) -> Eviction:
        no_right(cluster)
        return real(one)

    cluster.evict = evict  # type: ignore[method-assign]
    said = ours.restart("train", suspect())
    assert "; its next restart is told the same: patch configmap resume in ml: forbidden" in said
    said = ours.restart("train", restart())
    assert said.endswith(
        "what an earlier action has told its pods still stands: patch configmap resume in ml: forbidden"
    )


def test_a_job_that_ends_meanwhile_is_not_waited_for() -> None:
    cluster = Cluster(pods=[pod("a", "n1", phase="Succeeded")])
    assert over(cluster).restart("train", restart()) == "no pod of train was there to evict; it has ended"


def test_a_job_that_somebody_deletes_is_not_waited_for_long() -> None:
    cluster = Cluster(pods=[pod("a", "n1", ending=True)])
    with pytest.raises(CannotCarryOutError, match=r"^no pod of train was there to evict; .* after 60 s: 1 of 1 pods"):
        over(cluster).restart("train", restart())
    assert (cluster.evicted, cluster.now_s) == ([], NOW_S + 60)


def test_stopping_is_refused_with_the_command_that_does_it() -> None:
    with pytest.raises(CannotCarryOutError, match=r"kubectl patch KIND train .*suspend"):
        over(three_pods()).stop("train", "")


def test_a_preview_says_what_would_be_done_and_does_nothing() -> None:
    cluster = three_pods()
    cluster.nodes["n3"]["spec"]["unschedulable"] = True
    before = str(cluster.nodes)
    said = over(cluster).preview(exclusion("n2", "n3", "n9"))
    assert said == (
        "cordon n2 and taint it eagle-eye/excluded:NoSchedule; leave n3 as it is: cordoned by somebody else; "
        "leave n9, which is no node of the cluster"
    )
    assert over(cluster).preview(suspect()).endswith(", and tell the job to resume from memory:40")
    assert (str(cluster.nodes), cluster.evicted) == (before, [])
