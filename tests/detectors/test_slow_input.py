"""Ranks that wait for data: one host's trouble, or everybody's."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.slow_input import SlowInput
from eagle_eye.detectors.types import Blind, Verdict
from tests.detectors.windows import Story

DETECTOR = SlowInput(ratio=0.1, floor_s=10, ripe_s=30)


def waiting(nodes: list[int], rows: int, seconds: float = 0.2) -> Story:
    """Return a job of steps of half a second in which some nodes wait for data in the newest rows."""
    story = Story(nodes=8)
    shape = story.device["train_step"].shape
    story.device["train_data_wait_seconds"] = 0.005 * np.random.default_rng(0).uniform(0.5, 1.5, shape)
    story.device["train_data_wait_seconds"][-rows:, nodes] += seconds
    longest = story.device["train_data_wait_seconds"].max(axis=1, keepdims=True)
    story.device["nccl_collective_seconds"] = 0.05 + longest - story.device["train_data_wait_seconds"]
    return story


def said(story: Story) -> list[Verdict]:
    return DETECTOR.detect(story.window())


def test_one_node_that_waits_for_its_data_is_named_with_two_kinds_of_evidence() -> None:
    (verdict,) = said(waiting([2], 40))
    assert verdict.node == "n2"
    assert verdict.kinds == {"data_wait", "collective_arrival"}
    assert verdict.confidence >= 0.9


def test_it_is_not_sure_before_it_has_lasted() -> None:
    (verdict,) = said(waiting([2], 15))
    assert verdict.confidence < 0.9


def test_a_hiccup_is_nothing() -> None:
    assert said(waiting([2], 3)) == []


def test_many_nodes_that_wait_are_the_storages_matter() -> None:
    assert said(waiting([1, 2, 3], 40)) == []


def test_all_nodes_that_wait_are_nobodys_fault() -> None:
    assert said(waiting(list(range(8)), 40)) == []


def test_short_waits_do_not_matter() -> None:
    assert said(waiting([2], 40, seconds=0.02)) == []


def test_is_blind_where_nobody_reports_data_waits() -> None:
    with pytest.raises(Blind):
        said(Story())
