"""What is settled for nodes: which terms fit, which of several count, what policy makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_eye.server.engine.policy import decide, weigh
from eagle_eye.server.engine.settings import NodeTerms, PolicySettings
from eagle_eye.server.model.records import RuleWord
from tests.server.engine.situations import incident, situation

H100, GB200 = "NVIDIA H100 80GB HBM3", "NVIDIA GB200"
LOST = incident(fault="gpu_lost", fact=True)
NO_MODELS: dict[str, tuple[str, ...]] = {}


def confidence_min(*terms: NodeTerms, node: str = "n1", models: dict[str, tuple[str, ...]] = NO_MODELS) -> float:
    return PolicySettings(nodes=list(terms)).for_nodes([node], "hang", "exclude_node", models).confidence_min


def floor(value: float, **lists: Any) -> NodeTerms:
    return NodeTerms(confidence_min=value, **lists)


def grouped(*terms: NodeTerms, **changes: Any) -> PolicySettings:
    groups = {"r12": ["n1", "n2"], "lent": ["n2", "x*"]}
    return PolicySettings(mode="act", nodes=list(terms), node_groups=groups, **changes)


def word(rule: str, words: tuple[RuleWord, ...]) -> RuleWord:
    return next(one for one in words if one.rule == rule)


@pytest.mark.parametrize(
    ("terms", "models", "expected"),
    [
        ({"nodes": ["n*"]}, (H100,), 0.99),
        ({"nodes": ["m*"]}, (H100,), 0.9),
        ({"gpu_models": ["NVIDIA H100*"]}, (H100,), 0.99),
        ({"gpu_models": ["NVIDIA H100*"]}, (GB200,), 0.9),
        ({"gpu_models": ["NVIDIA H100*"]}, (GB200, H100), 0.9),
        ({"gpu_models": ["NVIDIA H100*"], "nodes": ["m*"]}, (H100,), 0.9),
        ({"nodes": ["n*"], "faults": ["hang"]}, (), 0.99),
        ({"nodes": ["n*"], "faults": ["gpu_lost"]}, (), 0.9),
    ],
)
def test_terms_apply_where_all_that_they_name_fits(
    terms: dict[str, Any], models: tuple[str, ...], expected: float
) -> None:
    assert confidence_min(floor(0.99, **terms), models={"n1": models}) == expected


def test_terms_that_name_more_come_first_whatever_they_say() -> None:
    wide, narrow = floor(0.99, nodes=["n*"]), floor(0.5, nodes=["n*"], faults=["hang"])
    assert confidence_min(wide, narrow) == confidence_min(narrow, wide) == 0.5


def test_a_node_named_in_full_comes_before_a_pattern() -> None:
    assert confidence_min(floor(0.99, nodes=["n*"]), floor(0.5, nodes=["n1"])) == 0.5


def test_among_equals_the_more_careful_value_counts() -> None:
    assert confidence_min(floor(0.5, nodes=["n*"]), floor(0.99, nodes=["?1"])) == 0.99


@pytest.mark.parametrize(("node", "expected"), [("n1", 0.9), ("n2", 0.99), ("x7", 0.99), ("y7", 0.9)])
def test_terms_for_groups_apply_to_the_nodes_in_them(node: str, expected: float) -> None:
    settings = grouped(floor(0.99, groups=["lent"]))
    assert settings.for_nodes([node], "hang", "exclude_node", {}).confidence_min == expected


@pytest.mark.parametrize(
    "terms",
    [
        [{"gpu_models": [H100]}],
        [{"groups": ["r12"]}, {"gpu_models": [H100]}],
        [{"groups": ["r12"]}, {"gpu_models": [H100], "faults": ["hang"]}],
        [{"groups": ["r12"], "gpu_models": [H100]}, {"groups": ["r12"], "faults": ["hang"]}],
        [{"nodes": ["n1"]}, {"groups": ["r12"], "gpu_models": [H100], "faults": ["hang"]}],
        [{"nodes": ["n*"], "groups": ["r12"]}, {"groups": ["r12"]}],
    ],
    ids=["type-over-site", "group-over-type", "group-over-type-and-fault", "type-over-fault", "node-over-all", "both"],
)
def test_the_node_comes_before_its_group_and_its_group_before_its_kind_of_gpu(terms: list[dict[str, Any]]) -> None:
    """The first of them is to count, and is the less careful: no care explains the choice."""
    given = [floor(0.99 if place else 0.5, **lists) for place, lists in enumerate(terms)]
    for order in (given, given[::-1]):
        floors = grouped(*order).for_nodes(["n1"], "hang", "exclude_node", {"n1": (H100,)})
        assert floors.confidence_min == 0.5


def test_each_node_of_a_job_has_the_terms_of_its_own_group() -> None:
    other = incident(id="other", fault="gpu_lost", fact=True, node="x2", nodes=["x2"])
    settings = grouped(NodeTerms(groups=["lent"], action="drain_node"))
    both = situation(settings=settings, incidents=[LOST, other])
    assert [(decide(one, both).kind, decide(one, both).exclude) for one in (LOST, other)] == [
        ("exclude_node", ("n1",)),
        ("drain_node", ("x2",)),
    ]


def test_terms_for_a_group_say_nothing_of_trouble_that_nodes_outside_it_have_too() -> None:
    settings = grouped(NodeTerms(groups=["r12"], action="notify"))
    assert decide(incident(node=None, nodes=["n1", "n2"]), situation(settings=settings)).kind == "notify"
    assert decide(incident(node=None, nodes=["n1", "n3"]), situation(settings=settings)).kind == "restart_job"


def test_the_groups_of_a_node_are_shown_beside_what_they_led_to() -> None:
    settings = grouped(NodeTerms(groups=["lent"], action="drain_node"))
    lost = incident(fault="gpu_lost", fact=True, node="n2", nodes=["n2"])
    values = word("node_terms", weigh(lost, situation(settings=settings)).words).values
    assert (values["groups"], values["action"]) == ("lent, r12", "drain_node (policy.nodes[0])")


def test_never_is_the_most_careful_of_drain_slowdowns() -> None:
    terms = [NodeTerms(nodes=["n1"], drain_slowdown_min=value) for value in (0.5, 0.0)]
    floors = PolicySettings(nodes=terms).for_nodes(["n1"], "hang", "exclude_node", {})
    assert floors.drain_slowdown_min == 0.0


def test_terms_for_gpus_that_nobody_knows_count_where_they_are_more_careful() -> None:
    assert confidence_min(floor(0.99, gpu_models=[GB200])) == 0.99
    assert confidence_min(floor(0.5, gpu_models=[GB200])) == 0.9


def test_an_action_takes_the_place_of_the_faults_own_and_names_its_key() -> None:
    settings = PolicySettings(mode="act", nodes=[NodeTerms(gpu_models=[GB200], action="drain_node")])
    weighing = weigh(LOST, situation(settings=settings, gpu_models={"n1": (GB200,)}))
    assert (weighing.decision.kind, weighing.decision.exclude, weighing.decision.restart) == (
        "drain_node",
        ("n1",),
        False,
    )
    said = word("node_terms", weighing.words)
    assert (said.outcome, said.values["gpu_models"], said.values["action"]) == (
        "changes",
        GB200,
        "drain_node (policy.nodes[0])",
    )
    assert "drain_node in place of exclude_node for gpu_lost on n1 (policy.nodes[0])" in said.reason


def test_an_action_because_of_unknown_gpus_says_so() -> None:
    settings = PolicySettings(mode="act", nodes=[NodeTerms(gpu_models=[GB200], action="notify")])
    decision = decide(LOST, situation(settings=settings))
    assert (decision.kind, decision.rule) == ("notify", "node_terms")
    assert "policy.nodes[0], for its GPUs are not known" in decision.hold


def test_nothing_is_said_where_no_terms_apply() -> None:
    settings = PolicySettings(mode="act", nodes=[NodeTerms(nodes=["x*"], action="notify")])
    weighing = weigh(LOST, situation(settings=settings))
    assert weighing.decision.kind == "exclude_node"
    assert word("node_terms", weighing.words).outcome == "not_applicable"


def test_what_is_only_reported_may_be_made_an_action_and_still_needs_its_evidence() -> None:
    settings = PolicySettings(mode="act", nodes=[NodeTerms(nodes=["n*"], action="exclude_node")])
    reported = incident(fault="throughput_drop", kinds=["step_time"], slowdown_ratio=0.5)
    assert decide(reported, situation(settings=PolicySettings(mode="act"))).rule == ""
    decision = decide(reported, situation(settings=settings))
    assert (decision.kind, decision.rule) == ("notify", "evidence")


@pytest.mark.parametrize(
    ("fault", "changes"),
    [
        ("gpu_memory_error", {"asks": "restart_job"}),
        ("process_crash", {"asks": "notify"}),
        ("process_crash", {"application": True}),
    ],
)
def test_terms_ask_for_no_more_than_a_presentation_does(fault: str, changes: dict[str, Any]) -> None:
    settings = PolicySettings(mode="act", nodes=[NodeTerms(nodes=["n*"], action="exclude_node")])
    what = incident(fault=fault, fact=True, **changes)
    assert decide(what, situation(settings=settings)).kind == decide(what, situation()).kind != "exclude_node"


def test_a_node_whose_terms_let_it_stay_does_not_leave_with_another() -> None:
    other = incident(id="other", fault="gpu_lost", fact=True, node="n2", nodes=["n2"])
    settings = PolicySettings(mode="act", nodes=[NodeTerms(nodes=["n2"], action="drain_node")])
    assert decide(LOST, situation(incidents=[other])).exclude == ("n1", "n2")
    assert decide(LOST, situation(incidents=[other], settings=settings)).exclude == ("n1",)


def test_terms_for_an_accusation_of_nobody_need_all_its_nodes() -> None:
    settings = PolicySettings(mode="act", nodes=[NodeTerms(nodes=["n1"], action="notify")])
    hang = incident(node=None, nodes=["n1", "n2"])
    assert decide(hang, situation(settings=settings)).kind == "restart_job"
    assert decide(incident(node=None, nodes=["n1"]), situation(settings=settings)).kind == "notify"


def test_slowness_is_drained_by_the_nodes_own_floors() -> None:
    slow = incident(
        fault="straggler", kinds=["compute_time"], confidence=0.7, slowdown_ratio=0.2, onset_s=situation().now_s - 400
    )
    settings = PolicySettings(mode="act", nodes=[NodeTerms(nodes=["n1"], drain_after_s=1_000.0)])
    assert decide(slow, situation()).kind == "drain_node"
    assert decide(slow, situation(settings=settings)).kind == "notify"
