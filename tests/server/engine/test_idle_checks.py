"""Whom idle nodes' checks are asked of: pure, within each node's budget and the fleet's limit."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.server.engine.idle_faults import WEEK_S, IdleCheckSettings, RequestedCheck, due

SETTINGS = IdleCheckSettings(weekly_budget_s=120, check_s=60, every_s=3_600, idle_s=600, nodes_at_once=2)
NOW_S = 1_800_000_000.0
LONG_AGO_S = NOW_S - 2 * WEEK_S


def nodes(
    *asked: RequestedCheck, idle: tuple[str, ...] = ("n1",), under_way: int = 0, now_s: float = NOW_S
) -> list[str]:
    return due(dict.fromkeys(idle, LONG_AGO_S), asked, under_way, SETTINGS, now_s)


def test_a_node_that_was_idle_long_enough_is_asked() -> None:
    assert nodes() == ["n1"]
    assert due({"n1": NOW_S - 599}, (), 0, SETTINGS, NOW_S) == []


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([RequestedCheck("n1", NOW_S - 5_000)], ["n1"]),
        ([RequestedCheck("n1", NOW_S - 3_599)], []),  # too soon
        ([RequestedCheck("n1", NOW_S - 5_000), RequestedCheck("n1", NOW_S - 9_000)], []),  # two minutes are spent
        (
            [RequestedCheck("n1", NOW_S - 5_000), RequestedCheck("n1", NOW_S - WEEK_S)],
            ["n1"],
        ),  # the older one by now is of another week
        (
            [RequestedCheck("n1", NOW_S - 5_000), RequestedCheck("n1", NOW_S - 9_000, begun=False)],
            ["n1"],
        ),  # cost nothing
        ([RequestedCheck("n1", NOW_S - 60, begun=False)], []),  # but is not repeated at once
        ([RequestedCheck("n2", NOW_S - 60), RequestedCheck("n2", NOW_S - 120)], ["n1"]),
        ([RequestedCheck("n1", NOW_S + 86_400)], []),  # the clock was set back
    ],
)
def test_a_node_is_asked_within_its_budget(asked: list[RequestedCheck], expected: list[str]) -> None:
    assert nodes(*asked) == expected


def test_no_more_nodes_than_the_limit_are_at_it_at_once() -> None:
    idle = ("n1", "n2", "n3")
    assert [nodes(idle=idle, under_way=open_checks) for open_checks in (0, 1, 2, 3)] == [["n1", "n2"], ["n1"], [], []]


def test_those_that_were_longest_not_asked_come_first() -> None:
    asked = (RequestedCheck("n1", NOW_S - 5_000), RequestedCheck("n2", NOW_S - 9_000))
    assert nodes(*asked, idle=("n1", "n2", "n3")) == ["n3", "n2"]


def test_without_a_budget_nobody_is_asked() -> None:
    assert IdleCheckSettings().weekly_budget_s == 0
    assert due({"n1": LONG_AGO_S}, (), 0, IdleCheckSettings(), NOW_S) == []


def test_a_budget_that_no_check_fits_into_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="weekly_budget_s: expected 0 or at least check_s"):
        msgspec.convert({"weekly_budget_s": 30}, IdleCheckSettings)


@given(
    budget_s=st.integers(0, 400),
    check_s=st.integers(10, 100),
    at_once=st.integers(1, 3),
    steps=st.lists(st.integers(60, 90_000), max_size=60),
    seed=st.integers(0, 1_000),
)
def test_within_any_week_no_node_begins_more_than_its_budget(
    budget_s: int, check_s: int, at_once: int, steps: list[int], seed: int
) -> None:
    if 0 < budget_s < check_s:
        budget_s = 0
    settings = IdleCheckSettings(
        weekly_budget_s=budget_s, check_s=check_s, every_s=300, idle_s=0, nodes_at_once=at_once
    )
    chance = random.Random(seed)
    now_s, asked = NOW_S, list[RequestedCheck]()
    for step_s in steps:
        now_s += step_s
        idle = {node: now_s for node in ("n1", "n2", "n3", "n4") if chance.random() < 0.7}
        under_way = chance.randint(0, at_once)
        chosen = due(idle, asked, under_way, settings, now_s)
        assert len(chosen) + under_way <= at_once
        assert set(chosen) <= set(idle)
        asked += [RequestedCheck(node, now_s, begun=chance.random() < 0.8) for node in chosen]
    for last in asked:
        week = [one for one in asked if one.node == last.node and 0 <= last.time_s - one.time_s < WEEK_S and one.begun]
        assert len(week) * check_s <= budget_s
