"""Each rule of policy: when it holds, in which words, and when it lets pass."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from eagle_eye.schema.action import MemberRank
from eagle_eye.server.engine.policy import RULE_NAMES, breaker_until_s, decide, exclusions_left, weigh
from eagle_eye.server.engine.settings import JobTerms, Maintenance, ModeRule, PolicySettings
from eagle_eye.server.model.records import Incident, Node
from tests.server.engine.situations import NOW_S, incident, past, situation


def act(**changes: Any) -> PolicySettings:
    return PolicySettings(mode="act", **changes)


def terms(**changes: Any) -> PolicySettings:
    return act(jobs=[JobTerms(jobs=["j"], **changes)])


def members(count: int) -> list[MemberRank]:
    return [MemberRank(rank, f"n{rank}", 0) for rank in range(count)]


LOST = incident(fault="gpu_lost", fact=True)
CRASH = incident(fault="process_crash", fact=True)
SPARES = [JobTerms(jobs=["j"], spares=2)]
SLOW = incident(fault="pcie_degraded", slowdown_ratio=0.3)
EARLY = incident(fault="recurrent_node", kinds=["history"])
WINDOW = Maintenance(from_s=NOW_S - 60, until_s=NOW_S + 60, nodes=["n5"], reason="new cables")


@pytest.mark.parametrize(
    ("rule", "what", "changes", "words"),
    [
        ("blind", LOST, {"blind": "2 of 8 nodes are heard"}, "2 of 8 nodes"),
        ("job_state", LOST, {"job_state": "preempted"}, "the job is preempted"),
        ("maintenance", LOST, {"settings": act(maintenance=[WINDOW]), "ranks": members(8)}, "new cables of n5"),
        (
            "standing",
            EARLY,
            {"standing": {"n1": Node(node="n1", state="draining", reason="alice", updated_s=0)}},
            "alice",
        ),
        ("under_way", LOST, {"actions": [past(attempt=1, state="accepted")]}, "action act for attempt 1 is accepted"),
        ("tries", LOST, {"actions": [past(attempt=1, incident_id="inc", state="expired")]}, "attempt 1 of 1"),
        ("tries", LOST, {"actions": [past(attempt=1, incident_id="inc", state="rejected")]}, "act by hand"),
        ("nodes_min", LOST, {"settings": terms(nodes_min=8)}, "leave 7, fewer than 8"),
        ("job_exclusions", LOST, {"settings": terms(exclusions_per_job=0)}, "the limit is 0"),
        ("job_restarts", CRASH, {"settings": terms(restarts_per_job=0)}, "the limit is 0"),
        ("fleet_exclusions", LOST, {"actions": [past(job=str(n), id=str(n)) for n in range(5)]}, "100 nodes is 5"),
        ("fleet_restarts", CRASH, {"settings": act(restarts_fleet=0)}, "policy.restarts_fleet"),
        ("breaker", CRASH, {"settings": act(breaker_actions=1), "actions": [past(job="k")]}, "the breaker is open"),
    ],
)
def test_a_rule_holds_under_its_name_with_value_and_remedy(
    rule: str, what: Incident, changes: dict[str, Any], words: str
) -> None:
    decision = decide(what, situation(**changes))
    assert decision.rule == rule
    assert words in decision.hold


BESIDE = incident(id="inc_2", job="k", node="n9", nodes=["n9"], fault="network_hang")
AT_ONE = {"n1": "leaf1", "n9": "leaf1"}


def test_trouble_of_two_jobs_at_one_switch_is_reported_and_excludes_nobody() -> None:
    decision = decide(
        incident(fault="nic_degraded", slowdown_ratio=0.3), situation(elsewhere=[BESIDE], switch_of=AT_ONE)
    )
    assert decision.rule == "shared_switch"
    assert "n9 (k) at the same switch leaf1" in decision.hold


@pytest.mark.parametrize(
    ("what", "beside", "switch_of"),
    [
        (incident(fault="nic_degraded", slowdown_ratio=0.3), BESIDE, {"n1": "leaf1", "n9": "leaf2"}),
        (incident(fault="nic_degraded", slowdown_ratio=0.3), BESIDE, {}),
        (
            incident(fault="nic_degraded", slowdown_ratio=0.3),
            msgspec.structs.replace(BESIDE, onset_s=BESIDE.onset_s - 121.0),
            AT_ONE,
        ),
        (
            incident(fault="nic_degraded", slowdown_ratio=0.3),
            msgspec.structs.replace(BESIDE, state="recovered"),
            AT_ONE,
        ),
        (incident(fault="nic_degraded", slowdown_ratio=0.3), msgspec.structs.replace(BESIDE, fault="gpu_lost"), AT_ONE),
        (
            incident(fault="nic_degraded", slowdown_ratio=0.3),
            msgspec.structs.replace(BESIDE, node="n1", nodes=["n1"]),
            AT_ONE,
        ),
        (LOST, BESIDE, AT_ONE),
    ],
    ids=[
        "another_switch",
        "no_topology",
        "long_before",
        "over",
        "no_trouble_of_a_switch",
        "the_same_node",
        "a_lost_gpu",
    ],
)
def test_a_node_is_excluded_where_nothing_speaks_for_its_switch(
    what: Incident, beside: Incident, switch_of: dict[str, str]
) -> None:
    decision = decide(what, situation(elsewhere=[beside], switch_of=switch_of))
    assert (decision.kind, decision.hold) == ("exclude_node", "")


@pytest.mark.parametrize(
    ("rule", "what", "changes"),
    [
        ("accused", incident(node=None, nodes=["n1", "n2"], fault="straggler"), {}),
        ("evidence", incident(kinds=["one"]), {}),
        ("confidence", incident(confidence=0.5), {}),
        ("cost", incident(fault="straggler", slowdown_ratio=0.1), {"settings": act(lost_work_s=86_400)}),
        ("may_restart", CRASH, {"settings": terms(may_restart=False)}),
        ("restart_owner", CRASH, {"restart_owner": "slurm"}),
        ("restart_owner", CRASH, {"settings": terms(restart_owner="nvrx")}),
    ],
)
def test_a_rule_leaves_nothing_but_telling(rule: str, what: Incident, changes: dict[str, Any]) -> None:
    decision = decide(what, situation(**changes))
    assert (decision.kind, decision.rule, decision.exclude, decision.restart) == ("notify", rule, (), False)


def test_a_job_that_may_not_be_restarted_loses_its_node_and_the_subscriber_is_told_why() -> None:
    decision = decide(LOST, situation(settings=terms(may_restart=False)))
    assert (decision.kind, decision.restart, decision.hold) == ("exclude_node", False, "")
    assert "may not be restarted" in decision.notes[0]


@pytest.mark.parametrize("settings", [terms(restarts_per_job=0), act(restarts_fleet=0)])
def test_without_a_restart_left_the_node_goes_alone_and_the_subscriber_is_told_why(settings: PolicySettings) -> None:
    decision = decide(LOST, situation(settings=settings))
    assert (decision.kind, decision.exclude, decision.restart, decision.hold) == ("exclude_node", ("n1",), False, "")
    assert "the limit is 0" in decision.notes[0]


@pytest.mark.parametrize("settings", [terms(restarts_per_job=0, spares=2), act(restarts_fleet=0, jobs=SPARES)])
def test_no_drain_joins_a_restart_that_no_budget_allows(settings: PolicySettings) -> None:
    draining = past(kind="drain_node", restart=False, exclude=["n9"], state="accepted")
    decision = decide(CRASH, situation(settings=settings, actions=[draining], ranks=members(10)))
    assert (decision.kind, decision.exclude) == ("restart_job", ())
    assert decision.hold


def test_where_operator_and_job_name_different_owners_it_is_not_us() -> None:
    assert not decide(LOST, situation(settings=terms(restart_owner="eagle-eye"), restart_owner="slurm")).restart
    assert decide(LOST, situation(settings=terms(restart_owner="eagle-eye"), restart_owner="eagle-eye")).restart


def test_other_jobs_on_the_node_are_named_to_whoever_acts() -> None:
    decision = decide(LOST, situation(neighbours={"n1": ["k"]}))
    assert "n1 also runs k" in decision.notes[0]


def test_known_spares_let_a_job_at_its_least_size_lose_a_node_until_they_are_used_up() -> None:
    settings = terms(nodes_min=8, spares=1)
    assert decide(LOST, situation(settings=settings)).hold == ""
    assert decide(LOST, situation(settings=settings, actions=[past()])).rule == "nodes_min"


def test_a_drain_under_way_does_not_stand_in_the_way_of_an_exclusion() -> None:
    draining = past(attempt=1, kind="drain_node", restart=False, exclude=["n1"], state="done")
    assert decide(LOST, situation(actions=[draining])).hold == ""
    assert decide(EARLY, situation(actions=[draining])).rule == "under_way"


def test_what_was_only_observed_takes_nothing_from_those_that_act() -> None:
    observed = [past(id=str(n), state="would_act") for n in range(9)]
    assert decide(LOST, situation(actions=observed)).hold == ""
    assert decide(LOST, situation(actions=observed, settings=PolicySettings())).rule == "job_exclusions"


def test_a_failed_action_is_tried_again_after_a_while_as_often_as_allowed() -> None:
    failed = past(attempt=1, incident_id="inc", state="failed", reports=[{"state": "failed", "detail": "no quorum"}])
    settings = act(tries_max=2, retry_s=200)
    early = decide(LOST, situation(settings=settings, actions=[failed]))
    assert (early.rule, "no quorum" in early.hold) == ("tries", True)
    assert decide(LOST, situation(settings=settings, actions=[failed], now_s=NOW_S + 101)).hold == ""
    twice = [failed, past(id="act2", attempt=1, incident_id="inc", state="failed")]
    assert "attempt 2 of 2" in decide(LOST, situation(settings=settings, actions=twice, now_s=NOW_S + 500)).hold


@pytest.mark.parametrize(
    ("age_s", "state", "held"), [(10, "running", True), (130, "running", False), (10, "refused", False)]
)
def test_a_planned_exclusion_waits_for_its_checkpoint_but_not_for_ever(age_s: float, state: str, held: bool) -> None:
    settings = act(checkpoint_wait_s=120)
    assert decide(SLOW, situation(settings=settings)).first == "checkpoint_now"
    asked = past(
        kind="checkpoint_now", attempt=1, incident_id="inc", preliminary=True, exclude=[], restart=False, state=state
    )
    decision = decide(SLOW, situation(settings=settings, actions=[asked], now_s=asked.created_s + age_s))
    assert (decision.rule == "checkpoint_first", decision.first) == (held, None)


def test_what_has_stopped_waits_for_no_checkpoint() -> None:
    assert decide(LOST, situation(settings=act(checkpoint_wait_s=120))).first is None


def test_a_node_to_be_drained_leaves_with_a_restart_only_where_a_spare_is_known() -> None:
    drain = past(kind="drain_node", restart=False, exclude=["n5"], attempt=1, state="accepted")
    known = situation(settings=terms(spares=2), actions=[drain], ranks=members(8))
    assert decide(LOST, known).exclude == ("n1", "n5")
    assert decide(LOST, situation(actions=[drain], ranks=members(8))).exclude == ("n1",)
    one = situation(settings=terms(spares=1), actions=[drain], ranks=members(8))
    assert decide(LOST, one).exclude == ("n1",)


def test_a_node_that_was_put_back_into_service_is_not_taken_out_with_a_restart() -> None:
    drain = past(kind="drain_node", restart=False, exclude=["n5"], attempt=0, state="done")
    back = situation(settings=terms(spares=2), actions=[drain], ranks=members(8))
    assert decide(LOST, back).exclude == ("n1",)


@pytest.mark.parametrize("state", ["accepted", "done"])
def test_a_drain_of_ours_whose_reason_somebody_changed_is_not_ours_to_make_leave(state: str) -> None:
    drain = past(kind="drain_node", restart=False, exclude=["n5"], attempt=1, state=state)
    ours = Node(node="n5", state="draining", reason="recurrent_node: inc_1", updated_s=0, by="server")
    theirs = Node(node="n5", state="draining", reason="new power supply", updated_s=0, by="tok_alice")
    left = [
        decide(LOST, situation(settings=terms(spares=2), actions=[drain], ranks=members(8), standing={"n5": node}))
        for node in (ours, theirs)
    ]
    assert [decision.exclude for decision in left] == [("n1", "n5"), ("n1",)]


def test_the_breaker_trips_at_the_last_of_too_many_and_rests_from_there() -> None:
    at = [past(id=str(place), created_s=time_s) for place, time_s in enumerate([0.0, 500.0, 550.0, 590.0])]
    assert breaker_until_s(at, 3, 100.0, 1000.0) == 1590.0
    assert breaker_until_s(at[:2], 3, 100.0, 1000.0) is None


def test_modes_are_found_by_the_most_specific_rule() -> None:
    rules = [
        ModeRule(jobs=["j*"], mode="observe"),
        ModeRule(jobs=["j"], mode="approve"),
        ModeRule(jobs=["j"], faults=["gpu_lost"], mode="act"),
    ]
    settings = act(modes=rules)
    assert decide(LOST, situation(settings=settings)).mode == "act"
    assert decide(incident(), situation(settings=settings)).mode == "approve"
    assert decide(incident(job="j2"), situation(settings=settings)).mode == "observe"
    assert decide(incident(job="k"), situation(settings=settings)).mode == "act"


def test_of_equally_specific_modes_the_more_careful_counts() -> None:
    rules = [ModeRule(faults=["hang"], mode="act"), ModeRule(kinds=["exclude_node"], mode="approve")]
    for order in (rules, rules[::-1]):
        assert decide(incident(), situation(settings=act(modes=order))).mode == "approve"


def test_every_rule_speaks_in_its_order_and_reasons_end_nowhere_empty() -> None:
    weighing = weigh(LOST, situation(blind="dark", members=1))
    assert tuple(word.rule for word in weighing.words) == RULE_NAMES
    holds = [word for word in weighing.words if word.outcome == "hold"]
    assert [word.rule for word in holds] == ["blind", "nodes_min"]
    assert all(word.reason for word in holds)
    assert weighing.decision.rule == "blind"


ONE_KIND = {"fault": "straggler", "family": "slow:n1", "kinds": ["compute_time", "step_time"], "confidence": 0.6}


def test_slow_by_one_strong_kind_is_drained_once_it_has_lasted_and_costs_something() -> None:
    lasting = incident(**ONE_KIND, slowdown_ratio=0.2, onset_s=NOW_S - 400)
    assert decide(lasting, situation(settings=act())).kind == "drain_node"
    assert decide(lasting, situation(settings=act(drain_slowdown_min=0))).kind == "notify"


def test_what_no_pace_can_show_is_reported_whatever_it_would_save() -> None:
    slow = incident(fault="power_throttle", kinds=["clock", "power"], slowdown_ratio=0.009)
    assert decide(slow, situation(settings=act(remaining_s=1e9))).kind == "notify"
    costly = msgspec.structs.replace(slow, slowdown_ratio=0.011)
    assert decide(costly, situation(settings=act(remaining_s=1e9))).kind == "exclude_node"


@pytest.mark.parametrize(
    "changes",
    [
        {"onset_s": NOW_S - 100},
        {"since_s": NOW_S - 100},
        {"slowdown_ratio": 0.01},
        {"confidence": 0.5},
        {"kinds": ["data_wait"]},
        {"asks": "notify"},
        {"node": None},
    ],
)
def test_what_is_new_cheap_doubtful_or_perhaps_its_work_drains_nobody(changes: dict[str, Any]) -> None:
    reported = incident(**{**ONE_KIND, "slowdown_ratio": 0.2, "onset_s": NOW_S - 400, **changes})
    assert decide(reported, situation(settings=act())).kind == "notify"


@pytest.mark.parametrize(("other", "held"), [({"attempt": 1}, True), ({"attempt": 0}, False), ({"job": "k"}, False)])
def test_only_what_is_asked_for_in_this_attempt_of_this_job_stands_in_the_way(
    other: dict[str, Any], held: bool
) -> None:
    asked = past(**{"attempt": 1, "state": "accepted", **other})
    assert (decide(LOST, situation(settings=act(), actions=[asked])).rule == "under_way") == held


def test_what_other_jobs_excluded_counts_against_the_fleet_and_leaves_this_job_the_rest() -> None:
    others = [past(job=str(n), id=str(n), exclude=[f"m{n}"]) for n in range(3)]
    now = situation(settings=terms(exclusions_per_job=10), actions=others)  # of a fleet of 100 nodes, which may lose 5
    assert exclusions_left(LOST, now, "act") == 2


def test_exclusions_that_are_used_up_hold_no_restart() -> None:
    used = [past(job=str(n), id=str(n)) for n in range(5)]
    assert decide(CRASH, situation(settings=act(), actions=used)).rule != "fleet_exclusions"


@pytest.mark.parametrize(
    ("flaps", "since_s", "standing", "held"),
    [
        (1, NOW_S - 5, {}, False),
        (0, NOW_S - 5, {}, True),  # the trouble that was acted on
        (1, NOW_S - 60, {}, True),  # it returned before the action ended
        (1, NOW_S - 5, {"n1": Node(node="n1", state="excluded", reason="hang", updated_s=0)}, True),
    ],
)
def test_trouble_that_returns_in_the_attempt_with_the_readmitted_node_is_acted_on_again(
    flaps: int, since_s: float, standing: dict[str, Node], held: bool
) -> None:
    done = past(attempt=1, incident_id="inc", node="n1", exclude=["n1"], updated_s=NOW_S - 50)
    again = incident(onset_s=NOW_S - 90, flaps=flaps, since_s=since_s)
    now = situation(settings=act(), actions=[done], standing=standing)
    assert (decide(again, now).rule == "under_way") == held


@pytest.mark.parametrize(("kinds", "held"), [(["standstill", "silence"], True), (["standstill", "quorum"], False)])
def test_one_replica_group_leaves_while_another_one_s_node_is_being_excluded(kinds: list[str], held: bool) -> None:
    other = past(attempt=1, node="n2", exclude=["n2"], state="running")
    now = situation(settings=act(), actions=[other])
    assert (decide(incident(kinds=kinds), now).rule == "under_way") == held
