"""Which pods are a job's: the same answers as the server's source of jobs gives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from eagle_eye.orchestrators.kubernetes import objects
from eagle_eye.orchestrators.kubernetes.objects import Pod
from eagle_eye.orchestrators.protocol import CannotCarryOutError
from eagle_eye.server.jobs import pods as server_pods
from eagle_eye.server.jobs.source import KubernetesSettings
from tests.orchestrators.kubernetes.builders import NOW_S, pod


def test_the_labels_are_those_of_the_servers_configuration() -> None:
    settings = KubernetesSettings()
    assert settings.job_labels == objects.JOB_LABELS
    assert settings.attempt_labels == objects.ATTEMPT_LABELS
    assert server_pods.PLACES == objects.PLACES


LABELS = st.dictionaries(
    st.sampled_from([*objects.JOB_LABELS, *objects.ATTEMPT_LABELS, *objects.PLACES]),
    st.sampled_from(["a", "b", "0", "1", "07"]),
)


@given(st.lists(st.tuples(LABELS, st.sampled_from(["", "n1", "n2"]), st.integers(0, 3)), max_size=6))
def test_attempt_and_nodes_are_the_servers(drawn: list[tuple[dict[str, str], str, int]]) -> None:
    pods = [
        pod(f"p{number}", on, labels=labels, created_s=NOW_S + age) for number, (labels, on, age) in enumerate(drawn)
    ]
    theirs = [msgspec.convert(msgspec.to_builtins(one), server_pods.Pod) for one in pods]
    reported = server_pods.jobs_of(theirs, KubernetesSettings(), Counter())
    assume(reported)
    for job in reported:
        own = objects.pods_of(job.name, pods, objects.JOB_LABELS)
        assert objects.attempt_of(own, objects.ATTEMPT_LABELS) == job.attempt
        nodes = {one.spec.node_name for one in objects.members(own, objects.ATTEMPT_LABELS)} - {""}
        assert tuple(sorted(nodes)) == job.nodes


def test_a_pod_belongs_to_the_first_label_that_it_has() -> None:
    one = pod("p", labels={"job-name": "train-worker-0", "jobset.sigs.k8s.io/jobset-name": "train"})
    assert objects.pods_of("train", [one], objects.JOB_LABELS) == [one]
    assert objects.pods_of("train-worker-0", [one], objects.JOB_LABELS) == []


def test_a_pod_that_several_selectors_find_counts_once() -> None:
    one = pod("p", labels={"job-name": "train", "batch.kubernetes.io/job-name": "train"})
    assert objects.pods_of("train", [one, one], objects.JOB_LABELS) == [one]


def test_two_jobs_of_one_name_are_reported_by_nobody() -> None:
    pods = [pod("a", namespace="ml"), pod("b", namespace="dev")]
    with pytest.raises(CannotCarryOutError, match=r"in 2 namespaces \(dev, ml\): name one with --namespace"):
        objects.pods_of("train", pods, objects.JOB_LABELS)


@pytest.mark.parametrize("name", ["", "a,b", "a b", "a=b", "-a", "a/b", "x" * 64, "a\n", "!a", "ä"])
def test_a_name_that_no_label_can_have_is_not_asked_for(name: str) -> None:
    assert objects.selectors(name, objects.JOB_LABELS) == []


def test_a_replaced_pod_does_not_count() -> None:
    index = {"job-name": "train", "batch.kubernetes.io/job-completion-index": "0"}
    old, new = pod("old", "n1", labels=index), pod("new", "n2", labels=index, created_s=NOW_S)
    assert objects.members([new, old], objects.ATTEMPT_LABELS) == [new]


def test_pods_of_an_attempt_that_is_over_do_not_count() -> None:
    def of(attempt: str, name: str) -> Pod:
        return pod(name, "n1", labels={"job-name": "t", "jobset.sigs.k8s.io/restart-attempt": attempt})

    assert objects.members([of("1", "a"), of("2", "b")], objects.ATTEMPT_LABELS) == [of("2", "b")]


@pytest.mark.parametrize(
    ("attempt", "meant"), [("3", 3), ("", 0), ("x", 0), ("-1", 0), ("99999999999", 0), ("9999999999", (1 << 31) - 1)]
)
def test_an_attempt_is_a_number_with_a_limit(attempt: str, meant: int) -> None:
    one = pod("p", annotations={"volcano.sh/job-version": attempt})
    assert objects.attempt_of([one], objects.ATTEMPT_LABELS) == meant


@pytest.mark.parametrize(
    ("started", "began_s"),
    [([], -1_000), ([-999, -999], -999), ([-999, 50], -999), ([40, 50], 40)],
)
def test_a_pod_has_begun_anew_once_all_its_containers_have(started: list[Any], began_s: float) -> None:
    one = pod("p", "n1", started_s=[NOW_S + time_s for time_s in started])
    assert objects.began_s(one) == NOW_S + began_s
