"""Ranks that wait for data: one host's trouble, or everybody's."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.slowness.slow_input import SlowInput
from eagle_eye.detectors.types import Blind, Verdict
from tests.detectors.windows import Story

DETECTOR = SlowInput(ratio=0.1, floor_s=10, ripe_s=30)


def waiting(nodes: list[int], rows: int, seconds: float = 0.2, longer: float | None = None, of: int = 60) -> Story:
    """Return a job of steps of half a second in which some nodes wait for data in the newest rows.

    All steps are as much longer, or ``longer`` seconds.
    """
    story = Story(nodes=8, rows=of)
    shape = story.device["train_step"].shape
    story.device["train_data_wait_seconds"] = 0.005 * np.random.default_rng(0).uniform(0.5, 1.5, shape)
    story.device["train_data_wait_seconds"][-rows:, nodes] += seconds
    story.device["train_step_seconds"][-rows:] += seconds if longer is None else longer
    longest = story.device["train_data_wait_seconds"].max(axis=1, keepdims=True)
    story.device["nccl_collective_seconds"] = 0.05 + longest - story.device["train_data_wait_seconds"]
    return story


def said(story: Story) -> list[Verdict]:
    return DETECTOR.detect(story.window())


def blocked(story: Story, node: int, rows: int, tasks: float = 6.0) -> Story:
    """Add tasks of the node's host that wait for its disk in the newest rows."""
    story.hardware()
    story.node["node_blocked_tasks"] = np.zeros((len(story.times_s), len(story.nodes)))
    story.node["node_blocked_tasks"][-rows:, node] = tasks
    return story


def test_one_node_that_waits_for_its_data_is_reported_and_how_to_know_more() -> None:
    (verdict,) = said(waiting([2], 40))
    assert verdict.node == "n2"
    assert verdict.kinds == {"data_wait"}
    assert verdict.confidence < 0.9
    assert "its part of the data" in verdict.summary


def test_its_host_that_waits_for_its_disk_is_the_second_kind_of_evidence() -> None:
    (verdict,) = said(blocked(waiting([2], 40), 2, 40))
    assert verdict.kinds == {"data_wait", "host_wait"}
    assert verdict.confidence >= 0.9
    assert verdict.evidence[-1].metric == "node_blocked_tasks"


def test_it_is_not_sure_before_it_has_lasted() -> None:
    (verdict,) = said(blocked(waiting([2], 15), 2, 15))
    assert verdict.confidence < 0.9


@pytest.mark.parametrize(("node", "rows"), [(3, 40), (2, 90)], ids=["another's", "as ever"])
def test_a_wait_of_another_host_or_one_that_was_always_there_is_no_evidence(node: int, rows: int) -> None:
    (verdict,) = said(blocked(waiting([2], 40), node, rows))
    assert verdict.kinds == {"data_wait"}


def test_a_hiccup_is_nothing() -> None:
    assert said(waiting([2], 3)) == []


def test_many_nodes_that_wait_are_the_storages_matter() -> None:
    assert said(waiting([1, 2, 3], 40)) == []


def test_all_nodes_that_wait_are_nobodys_fault() -> None:
    assert said(waiting(list(range(8)), 40)) == []


def test_short_waits_do_not_matter() -> None:
    assert said(waiting([2], 40, seconds=0.02)) == []


@pytest.mark.parametrize("longer", [0.0, 0.02], ids=["not longer", "longer by a tenth of it"])
def test_a_wait_that_steps_do_not_wait_for_is_nothing(longer: float) -> None:
    assert said(waiting([2], 40, longer=longer)) == []


@pytest.mark.parametrize("of", [12, 16], ids=["the first steps", "one report too few"])
def test_no_cost_is_claimed_before_the_job_has_a_pace(of: int) -> None:
    with pytest.raises(Blind, match="its pace is not known yet"):
        said(waiting([2], of - 1, of=of))


def test_a_wait_since_the_first_steps_is_of_unknown_cost() -> None:
    with pytest.raises(Blind, match="no time before"):
        said(waiting([2], 58))


def test_its_waiting_host_stands_for_the_time_before() -> None:
    (verdict,) = said(blocked(waiting([2], 58), 2, 58))
    assert verdict.kinds == {"data_wait", "host_wait"}


def test_is_blind_where_nobody_reports_data_waits() -> None:
    with pytest.raises(Blind):
        said(Story())
