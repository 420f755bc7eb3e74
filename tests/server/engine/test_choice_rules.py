"""What each rule that chooses an action says: its outcome, its reason and the values that it judged by."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_eye.schema.action import MemberRank
from eagle_eye.server.engine.judgement import AttemptCheckpoints, StepInMemory
from eagle_eye.server.engine.policy import decide, weigh
from eagle_eye.server.engine.rules import BYSTANDERS, CHOICE_RULES, PlannedAction, floors_for, is_supported
from eagle_eye.server.engine.settings import JobTerms, NodeTerms, PolicySettings
from eagle_eye.server.model.records import Incident, RuleWord
from tests.server.engine.situations import NOW_S, incident, past, situation

LOST = incident(fault="gpu_lost", fact=True)
CRASH = incident(fault="process_crash", fact=True)
HANG = incident()
TWO_NODES = incident(fault="straggler", node=None, nodes=["n1", "n2"])
SLOW = incident(fault="pcie_degraded", slowdown_ratio=0.3)
LONE = {"fault": "straggler", "kinds": ["compute_time"], "confidence": 0.6, "slowdown_ratio": 0.2}
LASTING = incident(**LONE, onset_s=NOW_S - 400)
EARLY = incident(fault="gpu_memory_error", asks="drain_node")
RESTARTED = {"kind": "restart_job", "exclude": [], "node": "n1"}


def act(**changes: Any) -> PolicySettings:
    return PolicySettings(mode="act", **changes)


def terms(**changes: Any) -> PolicySettings:
    return act(jobs=[JobTerms(jobs=["j"], **changes)])


def on_node(**changes: Any) -> PolicySettings:
    return act(nodes=[NodeTerms(nodes=["n1"], **changes)])


def word(rule: str, what: Incident, **changes: Any) -> RuleWord:
    return next(one for one in weigh(what, situation(**changes)).words if one.rule == rule)


def test_the_rules_have_the_names_of_records_and_documents() -> None:
    assert [rule.name for rule in CHOICE_RULES] == [
        "node_terms", "accused", "drain_instead", "evidence", "confidence", "cost", "repetition", "target", "spare",
        "may_restart", "restart_owner",
    ]  # fmt: skip
    assert BYSTANDERS.name == "bystanders"


@pytest.mark.parametrize(
    ("rule", "what", "changes"),
    [
        ("node_terms", LOST, {}),
        ("accused", CRASH, {}),
        ("drain_instead", incident(**{**LONE, "fault": "node_unreachable"}, onset_s=NOW_S - 400), {}),  # not slow
        ("drain_instead", incident(**{**LONE, "asks": "drain_node"}, onset_s=NOW_S - 400), {}),
        ("drain_instead", incident(**{**LONE, "kinds": ["compute_time", "step_time"], "confidence": 0.97}), {}),
        ("evidence", CRASH, {}),
        ("confidence", LOST, {}),
        ("confidence", incident(node=None, nodes=[]), {}),
        ("confidence", LASTING, {}),  # drained instead of excluded
        ("cost", LOST, {}),
        ("cost", incident(fault="pcie_degraded", asks="drain_node"), {}),
        ("repetition", LOST, {}),
        ("repetition", incident(fault="process_crash", application=True), {}),
        ("repetition", incident(fault="process_crash", node=None, nodes=[]), {}),
        ("spare", LOST, {}),
        ("spare", CRASH, {"pace_left_ratio": 0.5}),
        ("may_restart", EARLY, {}),
        ("restart_owner", EARLY, {"restart_owner": "slurm"}),
        ("bystanders", CRASH, {"neighbours": {"n1": ["k"]}}),
    ],
)
def test_a_rule_has_nothing_to_say_of_other_actions(rule: str, what: Incident, changes: dict[str, Any]) -> None:
    said = word(rule, what, **changes)
    assert (said.outcome, said.reason, said.values) == ("not_applicable", "", {})


DRAIN = {"drain_after_s": 300.0, "drain_slowdown_min": 0.03}


@pytest.mark.parametrize(
    ("rule", "what", "changes", "values"),
    [
        (
            "node_terms",
            incident(nodes=["n1", "n2"]),  # n1 alone is accused
            {"settings": on_node(confidence_min=0.5), "gpu_models": {"n1": ["B", "A"], "n2": ["C"]}},
            {"gpu_models": "A, B", "groups": "", "confidence_min": "0.5 (policy.nodes[0])"},
        ),
        (
            "node_terms",
            HANG,
            {"settings": act(nodes=[NodeTerms(groups=["b"], drain_after_s=9)], node_groups={"b": ["n*"], "a": ["n1"]})},
            {"gpu_models": "not known", "groups": "a, b", "drain_after_s": "9 (policy.nodes[0])"},
        ),
        ("accused", LOST, {}, {"node": "n1", "nodes": 1.0}),
        (
            "drain_instead",
            incident(**LONE, onset_s=NOW_S - 299),
            {},
            {**DRAIN, "lasted_s": 299.0, "slowdown_ratio": 0.2, "confidence": 0.6},
        ),
        ("evidence", HANG, {}, {"kinds": "standstill, rank_silence", "kinds_min": 2, "fact": "False"}),
        (
            "evidence",
            incident(fault="gpu_lost", fact=True, kinds=["one"]),
            {},
            {"kinds": "one", "kinds_min": 2, "fact": "True"},
        ),
        ("confidence", incident(confidence=0.9), {}, {"confidence": 0.9, "confidence_min": 0.9}),
        ("repetition", CRASH, {}, {"restarts": 0.0, "repeat_window_s": 86_400.0, "node": "n1"}),
        ("target", LOST, {}, {"exclude": "n1", "restart": "True"}),
        ("target", CRASH, {}, {"exclude": "", "restart": "True"}),
        ("target", EARLY, {}, {"exclude": "n1", "restart": "False"}),
        ("may_restart", LOST, {}, {"may_restart": "True"}),
        ("restart_owner", LOST, {}, {"restart_owner": "eagle-eye", "policy.jobs": "", "the job's word": ""}),
        (
            "restart_owner",
            LOST,
            {"settings": terms(restart_owner="eagle-eye"), "restart_owner": "eagle-eye"},
            {"restart_owner": "eagle-eye", "policy.jobs": "eagle-eye", "the job's word": "eagle-eye"},
        ),
        ("bystanders", LOST, {"neighbours": {"n2": ["k"], "n1": []}}, {"bystanders": 0}),
    ],
)
def test_a_rule_that_passes_says_by_what_it_judged(
    rule: str, what: Incident, changes: dict[str, Any], values: dict[str, Any]
) -> None:
    said = word(rule, what, **changes)
    assert (said.outcome, said.reason) == ("pass", "")
    assert said.values == values


@pytest.mark.parametrize(
    ("rule", "what", "changes", "outcome", "reason", "values"),
    [
        (
            "accused",
            TWO_NODES,
            {},
            "hold",
            "2 nodes are concerned and no single one is accused",
            {"node": None, "nodes": 2.0},
        ),
        (
            "evidence",
            incident(fault="node_unreachable", kinds=["silence"]),
            {},
            "hold",
            "one kind of evidence only (silence): not enough to exclude a node",
            {"kinds": "silence", "kinds_min": 2, "fact": "False"},
        ),
        (
            "confidence",
            incident(confidence=0.89),
            {},
            "hold",
            "confidence 0.89 is below 0.90 (policy.confidence_min): look at it yourself",
            {"confidence": 0.89, "confidence_min": 0.9},
        ),
        (
            "confidence",
            HANG,
            {"settings": on_node(confidence_min=0.99)},
            "hold",
            "confidence 0.97 is below 0.99 (policy.nodes[0]): look at it yourself",
            {"confidence": 0.97, "confidence_min": 0.99},
        ),
        (
            "confidence",
            incident(fault="process_crash", node=None, nodes=[], confidence=0.5),  # only a hang of nobody is certain
            {},
            "hold",
            "confidence 0.50 is below 0.90 (policy.confidence_min): look at it yourself",
            {"confidence": 0.5, "confidence_min": 0.9},
        ),
        (
            "restart_owner",
            CRASH,
            {"restart_owner": "slurm"},
            "hold",
            "slurm restarts job j, not we: nothing is asked for",
            {"restart_owner": "slurm", "policy.jobs": "", "the job's word": "slurm"},
        ),
        (
            "repetition",
            CRASH,
            {"actions": [past(**RESTARTED)]},
            "changes",
            "the job was restarted 1 times because of n1 already: now it is excluded",
            {"restarts": 1.0, "repeat_window_s": 86_400.0, "node": "n1"},
        ),
        (
            "spare",
            LOST,
            {"pace_left_ratio": 0.0},
            "changes",
            "no spare: too few nodes are left, and the job waits for one",
            {"pace_left_ratio": 0.0},
        ),
        (
            "bystanders",
            LOST,
            {"neighbours": {"n1": ["l", "k"]}},
            "changes",
            "n1 also runs k, l: these jobs are to be spared, let them end before the node is repaired",
            {"bystanders": "n1 also runs k, l"},
        ),
    ],
)
def test_a_rule_that_objects_says_why_and_by_what(
    rule: str, what: Incident, changes: dict[str, Any], outcome: str, reason: str, values: dict[str, Any]
) -> None:
    said = word(rule, what, **changes)
    assert (said.outcome, said.reason, said.values) == (outcome, reason, values)


@pytest.mark.parametrize("changes", [{"may_restart": False}, {"restart_owner": "slurm"}])
def test_who_may_not_restart_the_job_is_named_with_its_key(changes: dict[str, Any]) -> None:
    decision = decide(CRASH, situation(settings=terms(**changes)))
    rule = "may_restart" if "may_restart" in changes else "restart_owner"
    assert (decision.rule, decision.kind) == (rule, "notify")
    alone = decide(LOST, situation(settings=terms(**changes), neighbours={"n1": ["k"]}, pace_left_ratio=0.5))
    assert (alone.kind, alone.restart, len(alone.notes)) == ("exclude_node", False, 3)  # the spare, this, the bystander


def test_the_jobs_beside_each_node_that_leaves_are_named() -> None:
    both = PlannedAction("exclude_node", ("n2", "n1"))
    ruling = BYSTANDERS.judge(LOST, situation(neighbours={"n1": ["k"], "n2": ["l"]}), both)
    assert ruling.values == {"bystanders": "n1 also runs k; n2 also runs l"}


def test_terms_that_change_the_action_say_what_else_they_set() -> None:
    settings = on_node(action="drain_node", confidence_min=0.5, drain_after_s=9)
    said = word("node_terms", LOST, settings=settings)
    assert (said.outcome, said.values["action"]) == ("changes", "drain_node (policy.nodes[0])")
    assert said.reason == (
        "drain_node in place of exclude_node for gpu_lost on n1 (policy.nodes[0]); also confidence_min 0.5"
        " (policy.nodes[0]), drain_after_s 9 (policy.nodes[0])"
    )
    alone = word("node_terms", TWO_NODES, settings=act(nodes=[NodeTerms(nodes=["n*"], action="notify")]))
    assert (alone.outcome, alone.reason) == (
        "hold",
        "reported only, notify in place of exclude_node for straggler on n1, n2 (policy.nodes[0])",
    )


def test_terms_never_increase_what_the_evidence_asks_for() -> None:
    asked = incident(fault="gpu_lost", fact=True, asks="notify")
    settings = on_node(action="exclude_node", confidence_min=0.5)
    floors = floors_for(asked, settings, {})
    assert (floors.action, dict(floors.where)) == ("notify", {"confidence_min": "policy.nodes[0]"})
    alike = floors_for(asked, on_node(action="notify"), {})
    assert (alike.action, dict(alike.where)) == ("notify", {"action": "policy.nodes[0]"})


def test_one_kind_supports_a_drain_and_no_exclusion_but_a_fact_supports_both() -> None:
    one, fact = incident(kinds=["silence"]), incident(kinds=["exit"], fact=True)
    exclude, drain = (floors_for(one, on_node(action=kind), {}) for kind in ("exclude_node", "drain_node"))
    assert [is_supported(one, floors) for floors in (exclude, drain)] == [False, True]
    assert [is_supported(fact, floors) for floors in (exclude, drain)] == [True, True]


@pytest.mark.parametrize("changes", [{"fact": True}, {"node": None, "nodes": []}, {"confidence": 0.9}])
def test_a_fact_and_a_hang_of_nobody_are_supported_whatever_their_confidence(changes: dict[str, Any]) -> None:
    doubtful = incident(**{"confidence": 0.1, **changes})
    assert is_supported(doubtful, floors_for(doubtful, act(), {}))


@pytest.mark.parametrize("changes", [{"onset_s": NOW_S - 300}, {"slowdown_ratio": 0.03}, {"confidence": 0.6}])
def test_what_just_reaches_the_thresholds_is_drained(changes: dict[str, Any]) -> None:
    said = word("drain_instead", incident(**{**LONE, "onset_s": NOW_S - 400, **changes}))
    assert said.outcome == "changes"
    assert "it leaves when the job restarts anyway, and a check settles it" in said.reason


def test_what_is_excluded_with_its_evidence_is_not_drained_however_long_it_lasts() -> None:
    supported = incident(**{**LONE, "kinds": ["compute_time", "step_time"], "confidence": 0.97}, onset_s=NOW_S - 9_000)
    assert decide(supported, situation()).kind == "exclude_node"


COSTS = {"lost_work_s": 300.0, "restart_s": 240.0, "queue_s": 60.0}


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({}, {"remaining_s": 86_400.0, "gain_s": 43_200.0}),
        ({"ends_s": NOW_S + 4_000}, {"remaining_s": 4_000.0, "gain_s": 2_000.0}),
        ({"ends_s": NOW_S + 90_000}, {"remaining_s": 86_400.0, "gain_s": 43_200.0}),
        ({"ends_s": NOW_S - 9}, {"remaining_s": 0.0, "gain_s": 0.0}),
        ({"pace_left_ratio": 0.8}, {"remaining_s": 86_400.0, "gain_s": 32_400.0, "pace_left_ratio": 0.8}),
        ({"pace_left_ratio": 0.0}, {"remaining_s": 86_400.0, "gain_s": 0.0, "pace_left_ratio": 0.0}),
    ],
)
def test_cost_is_weighed_over_the_time_and_at_the_pace_that_are_left(
    changes: dict[str, Any], values: dict[str, Any]
) -> None:
    twice = incident(fault="pcie_degraded", slowdown_ratio=1.0)
    said = word("cost", twice, **changes)
    assert said.values == pytest.approx({"slowdown_ratio": 1.0, **COSTS, **values})


RANKS = [MemberRank(rank, node, 0) for rank, node in enumerate(("n0", "n1", "n2"))]
IN_MEMORY: dict[str, Any] = {
    "step": 40,
    "since_s": NOW_S - 1,
    "at_risk_steps": 3.0,
    "copies": 6,
    "copies_wanted": 6,
    "nodes": ("n0", "n1", "n2"),
    "step_s": 10.0,
}


@pytest.mark.parametrize(
    ("changes", "lost_work_s", "steps"),
    [
        ({}, 30.0, 3.0),
        # The newest step lacks a copy on n2, and with n1 its only other one may be gone.
        ({"lacking": ("n2",), "older": (StepInMemory(35, NOW_S - 60, ("n0", "n1", "n2"), ()),)}, 80.0, 8.0),
        ({"step": None, "older": (StepInMemory(35, NOW_S - 60, ("n0", "n1", "n2"), ()),)}, 300.0, None),
        ({"step_s": None}, 300.0, None),
        ({"persisted": ((41, NOW_S - 1),)}, 300.0, None),  # it resumes from storage
    ],
)
def test_the_work_that_a_restart_loses_is_what_memory_does_not_hold(
    changes: dict[str, Any], lost_work_s: float, steps: float | None
) -> None:
    checkpoints = AttemptCheckpoints(**{**IN_MEMORY, **changes})
    said = word("cost", SLOW, checkpoints=checkpoints, ranks=RANKS)
    assert (said.values["lost_work_s"], said.values.get("steps_at_risk")) == (lost_work_s, steps)


@pytest.mark.parametrize(
    ("what", "changes", "begins"),
    [
        ({"slowdown_ratio": 0.0}, {}, "how much the job is slower for it is not known"),
        ({"fault": "straggler", "slowdown_ratio": 0.029}, {}, "nothing says why it is slow, and it makes steps 2.9%"),
        ({"slowdown_ratio": 0.0099}, {"settings": act(remaining_s=1e9)}, "it makes steps 1.0% longer: below 1%"),
        (
            {"slowdown_ratio": 0.25},
            {"pace_left_ratio": 0.8},
            "no spare: with n1 the job has 80% of its pace; without it 7 nodes go on at 80% of the job's pace by plan",
        ),
        (
            {"slowdown_ratio": 1.0},
            {"settings": act(remaining_s=1_200)},
            "a restart costs 600 s (lost work 300, start 240, queue 60) and would save 600 s of the remaining 1200 s",
        ),
        ({"slowdown_ratio": 1.0}, {"ends_s": NOW_S - 9}, "a restart costs 600 s"),
        ({"slowdown_ratio": 1.0}, {"ends_s": NOW_S + 1, "pace_left_ratio": 0.9}, "a restart costs 600 s"),
    ],
)
def test_what_does_not_pay_is_not_excluded_and_the_figures_say_so(
    what: dict[str, Any], changes: dict[str, Any], begins: str
) -> None:
    said = word("cost", incident(**{"fault": "pcie_degraded", **what}), **changes)
    assert said.outcome == "hold"
    assert said.reason.startswith(begins)


@pytest.mark.parametrize(
    ("what", "settings"),
    [
        ({"fault": "straggler", "kinds": ["compute_time", "step_time"], "slowdown_ratio": 0.03}, {}),
        ({"fault": "pcie_degraded", "slowdown_ratio": 0.01}, {"remaining_s": 1e9}),
        ({"fault": "pcie_degraded", "slowdown_ratio": 1.0}, {"remaining_s": 1_201.0}),
    ],
)
def test_what_just_pays_is_excluded(what: dict[str, Any], settings: dict[str, Any]) -> None:
    assert decide(incident(**what), situation(settings=act(**settings))).kind == "exclude_node"


def test_what_costs_nothing_has_nothing_to_gain_without_a_spare_either() -> None:
    free = incident(fault="pcie_degraded", slowdown_ratio=0.0)
    assert word("cost", free, pace_left_ratio=0.5).values["gain_s"] == 0.0


def test_a_straggler_below_its_least_slowdown_is_held_with_that_value() -> None:
    held = incident(fault="straggler", kinds=["compute_time", "step_time"], slowdown_ratio=0.02)
    said = word("cost", held)
    assert (said.values["drain_slowdown_min"], said.values["slowdown_ratio"]) == (0.03, 0.02)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"created_s": NOW_S - 86_400}, "exclude_node"),
        ({"created_s": NOW_S - 86_401}, "restart_job"),
        ({"state": "would_act"}, "exclude_node"),
        ({"state": "rejected"}, "restart_job"),
        ({"job": "k"}, "restart_job"),
        ({"attempt": 1}, "restart_job"),  # this attempt's own
        ({"node": "n2"}, "restart_job"),
        ({"kind": "exclude_node", "exclude": ["n9"]}, "restart_job"),
    ],
)
def test_only_an_earlier_restart_of_the_job_for_the_same_node_makes_a_repetition(
    changes: dict[str, Any], kind: str
) -> None:
    before = past(**{**RESTARTED, **changes})
    assert word("repetition", CRASH, actions=[before]).outcome == ("changes" if kind == "exclude_node" else "pass")
