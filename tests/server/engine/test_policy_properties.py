"""What must be true of policy whatever the incident, the history and the settings."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from eagle_eye.schema.action import MemberRank
from eagle_eye.server.engine.policy import Decision, decide, weigh
from eagle_eye.server.engine.rules import Situation
from eagle_eye.server.engine.settings import JobTerms, Maintenance, ModeRule, NodeTerms, PolicySettings
from eagle_eye.server.model.records import Action, Incident
from tests.server.engine.situations import NOW_S, actions, incidents, situation

# From nothing to the most that can happen to a job.
_WEIGHT = {"none": 0, "notify": 0, "checkpoint_now": 1, "drain_node": 2, "restart_job": 3, "exclude_node": 4}
_MODE = {"observe": 0, "approve": 1, "act": 2}

names = st.sampled_from([[], ["j"], ["j*"], ["k"]])
mode_rules = st.builds(
    ModeRule,
    mode=st.sampled_from(["observe", "approve", "act"]),
    jobs=names,
    kinds=st.sampled_from([["exclude_node"], ["restart_job", "drain_node"]]),
)
job_terms = st.builds(
    JobTerms,
    jobs=st.sampled_from([["j"], ["j*"], ["k"]]),
    may_restart=st.sampled_from([None, True, False]),
    restart_owner=st.sampled_from([None, "", "eagle-eye", "slurm"]),
    nodes_min=st.sampled_from([None, 1, 6, 8]),
    spares=st.sampled_from([None, 0, 2]),
    exclusions_per_job=st.sampled_from([None, 0, 3]),
)
windows = st.builds(
    Maintenance,
    from_s=st.just(NOW_S - 1.0),
    until_s=st.floats(NOW_S - 0.5, NOW_S + 10.0),
    jobs=names,
    nodes=st.sampled_from([[], ["n1"], ["x*"]]),
)
node_terms = st.builds(
    NodeTerms,
    nodes=st.sampled_from([["n1"], ["n*"], ["x*"]]),
    groups=st.sampled_from([[], ["one"], ["all"]]),
    gpu_models=st.sampled_from([[], ["NVIDIA H100*"], ["NVIDIA GB200"]]),
    action=st.sampled_from(["notify", "drain_node", "restart_job", "exclude_node"]),
    confidence_min=st.sampled_from([None, 0.5, 1.0]),
)
policies = st.builds(
    PolicySettings,
    mode=st.sampled_from(["observe", "approve", "act"]),
    modes=st.lists(mode_rules, max_size=3),
    jobs=st.lists(job_terms, max_size=3),
    maintenance=st.lists(windows, max_size=2),
    nodes=st.lists(node_terms, max_size=3),
    node_groups=st.just({"one": ["n1"], "all": ["n*"]}),
    restarts_per_job=st.integers(0, 5),
    restarts_fleet=st.integers(0, 5),
    breaker_actions=st.integers(1, 4),
    tries_max=st.integers(1, 2),
)
histories = st.lists(actions, max_size=10)


def at(policy: PolicySettings, history: list[Action], **changes: Any) -> Situation:
    ranks = [MemberRank(rank, f"n{rank}", 0) for rank in range(8)]
    return situation(settings=policy, actions=history, ranks=ranks, **changes)


def weight(decision: Decision) -> tuple[int, int, bool]:
    """How drastic a decision is: nothing while it waits, then by its mode, kind and whether the job is restarted."""
    if decision.hold:
        return (0, 0, False)
    return (_WEIGHT[decision.kind] and _MODE[decision.mode], _WEIGHT[decision.kind], decision.restart)


CAREFUL: tuple[Callable[[PolicySettings], PolicySettings], ...] = (
    lambda policy: replace(policy, mode="observe", modes=[]),
    lambda policy: replace(policy, jobs=[*policy.jobs, JobTerms(jobs=["j"], may_restart=False)]),
    lambda policy: replace(policy, maintenance=[*policy.maintenance, Maintenance(from_s=0.0, until_s=NOW_S + 1)]),
    lambda policy: replace(policy, exclusions_fleet_floor=0, exclusions_fleet_ratio=0.0),
    lambda policy: replace(policy, restarts_fleet=0),
    lambda policy: replace(policy, breaker_actions=1),
    lambda policy: replace(policy, confidence_min=1.0),
    lambda policy: replace(policy, nodes=[NodeTerms(nodes=["*"], action="notify")]),
    lambda policy: replace(policy, lost_work_s=10 * policy.remaining_s),
)


@settings(max_examples=50)
@given(incidents, histories, policies, st.sampled_from(CAREFUL))
def test_more_careful_settings_never_give_a_more_drastic_decision(
    what: Incident, history: list[Action], policy: PolicySettings, careful: Callable[[PolicySettings], PolicySettings]
) -> None:
    before, after = decide(what, at(policy, history)), decide(what, at(careful(policy), history))
    assert all(less <= more for less, more in zip(weight(after), weight(before), strict=True))


@settings(max_examples=50)
@given(incidents, histories, policies)
def test_nothing_is_asked_for_while_blind(what: Incident, history: list[Action], policy: PolicySettings) -> None:
    assert weight(decide(what, at(policy, history, blind="dark")))[1] == 0


@settings(max_examples=50)
@given(incidents, histories, policies)
def test_budgets_are_never_exceeded(what: Incident, history: list[Action], policy: PolicySettings) -> None:
    decision = decide(what, at(policy, history))
    if decision.hold or decision.kind in ("notify", "none"):
        return
    since_s, states = NOW_S - policy.window_s, ("awaiting", "requested", "accepted", "running", "done")
    lately = [action for action in history if action.created_s >= since_s and action.state in states]
    mine = [action for action in lately if action.job == what.job]
    terms = policy.for_job(what.job)
    if decision.kind == "exclude_node":
        assert sum(len(action.exclude) for action in mine) + len(decision.exclude) <= terms.exclusions_per_job
        assert situation().members - len(decision.exclude) + (terms.spares or 0) >= terms.nodes_min
    if decision.restart:
        assert terms.may_restart
        assert sum(action.restart for action in mine) < terms.restarts_per_job
        assert sum(action.restart for action in lately) < policy.restarts_fleet


@settings(max_examples=50)
@given(incidents, histories, policies, st.randoms(use_true_random=False))
def test_neither_the_order_of_actions_nor_that_of_rules_matters(
    what: Incident, history: list[Action], policy: PolicySettings, order: random.Random
) -> None:
    def mixed(items: list[Any]) -> list[Any]:
        return order.sample(items, len(items))

    other = replace(policy, modes=mixed(policy.modes), jobs=mixed(policy.jobs), nodes=mixed(policy.nodes))
    places = re.compile(r"policy\.nodes\[\d\]")  # a reason says which of them it was
    one, another = decide(what, at(policy, history)), decide(what, at(other, mixed(history)))
    assert dataclasses.replace(one, hold=places.sub("", one.hold)) == dataclasses.replace(
        another, hold=places.sub("", another.hold)
    )


@settings(max_examples=50)
@given(incidents, histories, policies)
def test_every_hold_names_its_rule_and_says_why(what: Incident, history: list[Action], policy: PolicySettings) -> None:
    weighing = weigh(what, at(policy, history))
    holds = [word for word in weighing.words if word.outcome == "hold" and word.rule != "mode"]
    assert all(len(word.reason) > len("no") for word in holds)
    first = (holds[0].rule, holds[0].reason) if holds else ("", "")
    assert (weighing.decision.rule, weighing.decision.hold) == first
