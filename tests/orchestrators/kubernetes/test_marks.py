"""Whose a node's exclusion is: every way in which somebody may have had a hand in it since."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.orchestrators.kubernetes import objects
from eagle_eye.orchestrators.kubernetes.objects import ClusterNode
from tests.orchestrators.kubernetes.builders import Cluster, cause, node

SINCE = "2027-01-15T08:00:00Z"


def marked(before: ClusterNode | None = None, **changes: Any) -> ClusterNode:
    """A node after our patch, with ``changes`` of its spec on top."""
    cluster = Cluster(nodes=("n1",))
    if before is not None:
        cluster.nodes["n1"] = msgspec.to_builtins(before)
    cluster.mark("n1", objects.marking(cluster.node("n1") or node(), cause(), "eagle-eye", "NoSchedule", SINCE))
    cluster.nodes["n1"]["spec"].update(changes)
    return cluster.node("n1") or node()


def whose(one: ClusterNode, owner: str = "eagle-eye") -> str:
    return objects.whose(one, owner).state


def test_a_node_that_we_marked_is_ours_and_says_who_did_it_and_why() -> None:
    one = marked()
    ours = objects.whose(one, "eagle-eye").ours
    assert one.spec.unschedulable
    assert whose(one) == "ours"
    assert ours == objects.ExclusionMark(
        "eagle-eye", "inc-1", "act-1", "gpu_lost: XID 79 on GPU 3", SINCE, "NoSchedule"
    )


def test_the_keys_of_our_marks_are_those_that_the_server_takes_for_ours() -> None:
    from eagle_eye.server.jobs.pods import KubernetesNode, node_of

    seen = msgspec.convert(msgspec.to_builtins(marked()), KubernetesNode)
    assert node_of(seen).reason == "eagle-eye: cordoned"


def test_a_free_node_is_nobodys() -> None:
    assert whose(node()) == "free"


def test_a_cordon_without_our_marks_is_somebody_elses() -> None:
    assert whose(node(unschedulable=True)) == "theirs"


def test_a_cordon_that_was_lifted_and_put_on_anew_is_no_longer_ours() -> None:
    again = msgspec.to_builtins(marked())
    again["metadata"]["managedFields"] = [{"manager": "kubectl", "fieldsV1": {"f:spec": {"f:unschedulable": {}}}}]
    found = objects.whose(msgspec.convert(again, ClusterNode), "eagle-eye")
    assert (found.state, found.why) == ("theirs", "cordoned anew by 'kubectl'")


def test_the_account_of_another_field_says_nothing_about_the_cordon() -> None:
    seen = msgspec.to_builtins(marked())
    seen["metadata"]["managedFields"] = [
        {"manager": "kubelet", "fieldsV1": {"f:status": {}}},
        {"manager": "eagle-eye", "fieldsV1": {"f:spec": {"f:unschedulable": {}, "f:taints": {}}}},
    ]
    assert whose(msgspec.convert(seen, ClusterNode)) == "ours"


def test_another_eagle_eyes_exclusion_is_not_ours() -> None:
    assert whose(marked(), owner="eagle-eye-b") == "taken"


@pytest.mark.parametrize(
    "taints",
    [
        [],
        None,
        [{"key": objects.TAINT, "value": "gpu_lost", "effect": "NoExecute"}],
        [{"key": objects.TAINT, "value": "maintenance", "effect": "NoSchedule"}],
    ],
)
def test_a_changed_taint_says_that_somebody_has_taken_over(taints: Any) -> None:
    assert whose(marked(taints=taints)) == "taken"


@pytest.mark.parametrize("text", ["", "{}", "mine now", "[1]", '{"owner": 1}'])
def test_a_changed_annotation_says_that_somebody_has_taken_over(text: str) -> None:
    assert whose(node(unschedulable=True, annotations={objects.ANNOTATION: text})) == "taken"


def test_a_taken_off_annotation_makes_the_cordon_theirs() -> None:
    seen = msgspec.to_builtins(marked())
    seen["metadata"]["annotations"] = {}
    assert whose(msgspec.convert(seen, ClusterNode)) == "theirs"


def test_a_lifted_cordon_is_seen_although_the_other_marks_are_there() -> None:
    assert whose(marked(unschedulable=False)) == "uncordoned"


def test_taints_of_others_come_through_marking_and_unmarking() -> None:
    unreachable = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute", "timeAdded": SINCE}
    one = marked(node(taints=[unreachable]))
    assert [taint.key for taint in one.spec.taints or ()] == ["node.kubernetes.io/unreachable", objects.TAINT]
    assert objects.unmarking(one, uncordon=True)["spec"] == {"taints": [unreachable], "unschedulable": None}


def test_a_patch_holds_only_for_the_node_as_it_was_read() -> None:
    patches = (objects.marking(node(), cause(), "o", "NoSchedule", SINCE), objects.unmarking(node(), uncordon=False))
    assert [patch["metadata"]["resourceVersion"] for patch in patches] == ["7", "7"]


def test_a_cordon_stays_where_only_our_marks_go() -> None:
    assert objects.unmarking(marked(), uncordon=False)["spec"] == {"taints": None}


@given(st.text(max_size=200))
def test_any_fault_gives_a_taint_and_a_condition_that_kubernetes_accepts(text: str) -> None:
    value, reason = objects.taint_value(text), objects.camel(text)
    assert 1 <= len(value) <= 63
    assert value[0].isalnum()
    assert value[-1].isalnum()
    assert reason.isascii()
    assert reason[0].isalpha()
    assert len(reason) <= 132


@given(st.text(max_size=300), st.text(max_size=40))
def test_what_was_marked_is_ours_whatever_the_fault_says(summary: str, fault: str) -> None:
    cluster = Cluster(nodes=("n1",))
    patch = objects.marking(node(), cause(summary=summary, fault=fault), "eagle-eye", "NoSchedule", SINCE)
    cluster.mark("n1", patch)
    assert whose(cluster.node("n1") or node()) == "ours"
