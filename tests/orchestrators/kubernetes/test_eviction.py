"""Which pods go, and when a job has come back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.orchestrators.kubernetes.objects import Pod
from eagle_eye.orchestrators.kubernetes.orchestrator import bystanders, named, progress, victims
from tests.orchestrators.kubernetes.builders import NOW_S, pod


def names(pods: list[Pod]) -> list[str]:
    return [one.metadata.name for one in pods]


def test_a_restart_takes_every_pod_and_those_on_the_left_node_first() -> None:
    pods = [pod("a", "n1"), pod("b", "n2"), pod("c", "n3")]
    assert names(victims(pods, {"n2"}, NOW_S, "job")) == ["b", "a", "c"]


def test_an_elastic_job_loses_only_the_pods_on_left_nodes() -> None:
    assert names(victims([pod("a", "n1"), pod("b", "n2")], {"n2"}, NOW_S, "nodes")) == ["b"]


def test_an_elastic_job_that_is_to_restart_where_it_is_restarts_whole() -> None:
    assert names(victims([pod("a", "n1"), pod("b", "n2")], (), NOW_S, "nodes")) == ["a", "b"]


def test_what_began_after_the_fault_was_reported_stays() -> None:
    pods = [pod("old", "n1", created_s=NOW_S - 5), pod("new", "n2", created_s=NOW_S + 1)]
    assert names(victims(pods, (), NOW_S, "job")) == ["old"]


def test_a_pod_whose_containers_were_all_restarted_since_stays() -> None:
    assert victims([pod("p", "n1", started_s=[NOW_S + 3])], (), NOW_S, "job") == []


def test_on_a_left_node_nothing_of_the_job_stays_however_new() -> None:
    assert names(victims([pod("new", "n2", created_s=NOW_S + 5)], {"n2"}, NOW_S, "job")) == ["new"]


def test_nobody_saying_when_all_of_them_go() -> None:
    assert names(victims([pod("new", "n1", created_s=NOW_S + 5)], (), None, "job")) == ["new"]


def test_pods_that_have_ended_end_already_or_run_nowhere_are_not_evicted() -> None:
    pods = [pod("done", "n1", phase="Succeeded"), pod("failed", "n1", phase="Failed"), pod("waits")]
    assert victims([*pods, pod("ending", "n1", ending=True)], {"n1"}, NOW_S, "job") == []


@given(st.sets(st.sampled_from(["n1", "n2", "n3"])), st.sampled_from(["job", "nodes"]), st.floats(-100, 100))
def test_victims_are_pods_of_the_job_each_once(without: set[str], scope: str, detected_s: float) -> None:
    pods = [pod(f"p{number}", f"n{1 + number % 3}", created_s=NOW_S + number * 10 - 50) for number in range(9)]
    found = victims(pods, without, NOW_S + detected_s, scope)  # type: ignore[arg-type]
    assert len({one.metadata.uid for one in found}) == len(found)
    assert {one.metadata.uid for one in pods if one.spec.node_name in without} <= {one.metadata.uid for one in found}


def test_a_job_runs_again_when_as_many_pods_run_as_before() -> None:
    assert progress([pod("a2", "n1"), pod("b2", "n3")], {"uid-a", "uid-b"}, {"n2"}, 2).done


def test_an_evicted_pod_that_still_runs_is_not_the_job_come_back() -> None:
    far = progress([pod("a", "n1"), pod("b2", "n3")], {"uid-a"}, (), 2)
    assert (far.done, far.waiting) == (False, "1 of 2 pods are not back")


def test_the_schedulers_word_on_a_pod_that_waits_is_passed_on() -> None:
    why = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 Insufficient gpu."}]
    far = progress([pod("a2", conditions=why)], (), (), 1)
    assert far.waiting == "ml/a2 waits for a node: 0/3 nodes are available: 3 Insufficient gpu."


def test_a_pod_that_cannot_end_is_named() -> None:
    far = progress([pod("a", "n2", ending=True)], {"uid-a"}, {"n2"}, 1)
    assert far.waiting == "1 of 1 pods are not back; still ending: ml/a"


def test_a_pod_that_comes_back_to_the_left_node_is_no_success() -> None:
    far = progress([pod("a2", "n2")], (), {"n2"}, 1)
    assert not far.done
    assert "ml/a2 on n2; look at the pod's tolerations" in far.waiting


def test_a_job_that_has_succeeded_meanwhile_is_waited_for_no_longer() -> None:
    far = progress([pod("a", "n1", phase="Succeeded")], (), (), 1)
    assert (far.done, far.ended) == (True, True)


def test_a_job_without_pods_has_not_come_back() -> None:
    assert not progress([], (), (), 1).done


def test_bystanders_are_other_peoples_pods() -> None:
    there = [
        pod("mine", "n1", uid="mine"),
        pod("theirs", "n1", job="other"),
        pod("exporter", "n1", owner="DaemonSet"),
        pod("static", "n1", annotations={"kubernetes.io/config.mirror": "x"}),
        pod("over", "n1", phase="Succeeded"),
    ]
    assert bystanders(there, {"mine"}) == ["ml/theirs"]


def test_long_lists_are_cut_and_counted() -> None:
    assert named([str(number) for number in range(10)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
