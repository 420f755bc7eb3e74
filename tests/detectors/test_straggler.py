"""Slow ranks against their peers: how soon, how surely, and what is only work, noise or a hiccup."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eagle_eye.detectors.signs.even_work import even_work
from eagle_eye.detectors.signs.step_noise import MEMORY_UNKNOWN, memory
from eagle_eye.detectors.slowness.straggler import (
    CONFIDENCE_EARLY,
    CONFIDENCE_LONE,
    CONFIDENCE_RIPE,
    CONFIDENCE_TOLD,
    Straggler,
)
from eagle_eye.detectors.types import Blind, Verdict
from tests.detectors.windows import Story

DETECTOR = Straggler(ratio=1.1, mild_ratio=1.05, floor_s=10, ripe_s=30, false_per_1000_node_days=0.1)
STEP_S = 5.0


def job(nodes: int = 8, rows: int = 200, noise: float = 0.008, seed: int = 3, wait: float = 1.0) -> Story:
    """Return a job of steps of five seconds, seen every second, whose waits follow from the slowest."""
    story = Story(nodes=nodes, rows=rows)
    rng = np.random.default_rng(seed)
    steps = np.arange(rows) // int(STEP_S)
    spread = 1 + 0.01 * rng.normal(size=nodes)
    compute = 3.0 * spread * np.exp(noise * rng.normal(size=(steps[-1] + 1, nodes)))
    story.device = {
        "train_step": np.repeat(1000.0 + steps[:, None], nodes, axis=1),
        "train_step_seconds": np.full((rows, nodes), STEP_S),
        "train_compute_seconds": compute[steps],
    }
    waits(story, wait)
    return story


def waits(story: Story, base: float = 1.0) -> Story:
    compute = story.device["train_compute_seconds"]
    longest = compute.max(axis=1, keepdims=True)
    story.device["nccl_collective_seconds"] = base + longest - compute
    story.device["train_step_seconds"] = np.repeat(STEP_S - 3.0 + longest, compute.shape[1], axis=1)
    return story


def slow(story: Story, ratio: float, steps: int, node: int = 2) -> Story:
    story.device["train_compute_seconds"][-int(steps * STEP_S) :, node] *= ratio
    return waits(story)


def said(story: Story, **changes: Any) -> list[Verdict]:
    return DETECTOR.detect(story.window(**changes))


def test_ten_percent_on_fixed_length_data_is_reported_after_three_steps() -> None:
    (verdict,) = said(slow(job(), 1.13, 4))
    assert verdict.node == "n2"
    assert verdict.kinds == {"compute_time", "collective_arrival", "step_time", "own_history"}
    assert verdict.confidence == CONFIDENCE_EARLY


def test_what_lasts_becomes_sure() -> None:
    (verdict,) = said(slow(job(), 1.2, 8))
    assert verdict.confidence == CONFIDENCE_RIPE
    assert verdict.slowdown_ratio == pytest.approx(0.6 / 5.0, rel=0.2)


def slow_at_once(nodes: int, steps: int = 12) -> list[Verdict]:
    """So many nodes of sixteen become slow at one moment."""
    story = job(nodes=16)
    for node in range(2, 2 + nodes):
        slow(story, 1.2 + 0.01 * node, steps, node)
    return said(story)


def test_two_nodes_that_become_slow_at_once_are_both_named() -> None:
    found = slow_at_once(2)
    assert {verdict.node for verdict in found} == {"n2", "n3"}
    assert all(verdict.confidence == CONFIDENCE_RIPE for verdict in found)


def test_three_nodes_that_become_slow_at_once_share_what_slows_them() -> None:
    (verdict,) = slow_at_once(3)
    assert (verdict.node, verdict.nodes, verdict.asks) == (None, ("n2", "n3", "n4"), "notify")
    assert "became slow together" in verdict.summary


def test_slowness_that_makes_no_step_longer_costs_nothing() -> None:
    story = slow(job(), 1.3, 20)
    story.device["train_step_seconds"][:] = STEP_S
    (verdict,) = said(story)
    assert (verdict.slowdown_ratio, verdict.asks) == (0.0, "none")
    assert "not longer" in verdict.summary


def test_what_the_pace_is_too_uneven_to_show_is_recorded_and_its_cost_is_not_known() -> None:
    story = slow(job(), 1.3, 20)
    uneven = np.repeat(np.exp(0.5 * np.random.default_rng(4).normal(size=40)), int(STEP_S))
    story.device["train_step_seconds"] = STEP_S * uneven[:, None] * np.ones(8)
    (verdict,) = said(story)
    assert (verdict.slowdown_ratio, verdict.asks) == (0.0, "none")
    assert "not known" in verdict.summary


def test_whom_nobody_waits_for_because_others_are_as_late_in_each_step_is_none() -> None:
    story = job(rows=400)
    compute = story.device["train_compute_seconds"]
    late = np.arange(400) // int(STEP_S) % 7
    late += late >= 2  # another node in each step
    compute[np.arange(400), late] *= 1.5
    story.device["train_compute_seconds"][-200:, 2] *= 1.15
    assert said(waits(story)) == []


def test_computing_that_is_a_small_part_of_a_step_makes_no_straggler() -> None:
    story = slow(job(), 1.3, 20)
    story.device["train_step_seconds"] += 500.0
    assert said(story) == []


def test_the_onset_is_when_it_became_slow() -> None:
    story = slow(job(), 1.3, 12)
    (verdict,) = said(story)
    assert verdict.onset_s == pytest.approx(story.times_s[-60], abs=2 * STEP_S)


def test_the_onset_is_the_beginning_of_its_first_slow_step_however_long_that_took() -> None:
    story = slow(job(), 3.0, 12)
    (verdict,) = said(story)
    step_s = float(np.median(story.device["train_step_seconds"][-60:]))
    assert verdict.onset_s == pytest.approx(story.times_s[-60] - step_s, abs=0.5)


def test_the_summary_says_what_it_costs() -> None:
    (verdict,) = said(slow(job(), 3.0, 12))
    assert verdict.summary.endswith(f"the job's steps are {100 * verdict.slowdown_ratio:.0f}% longer for it")


def test_a_mild_slowness_counts_when_it_has_lasted_and_peers_are_alike() -> None:
    story = job(32)
    story.device["train_compute_seconds"] /= story.device["train_compute_seconds"][:100].mean(axis=0)
    assert said(slow(story, 1.08, 3)) == []
    story = job(32)
    story.device["train_compute_seconds"] /= story.device["train_compute_seconds"][:100].mean(axis=0)
    (verdict,) = said(slow(story, 1.08, 30))
    assert verdict.node == "n2"
    assert verdict.confidence == CONFIDENCE_RIPE


def test_a_mild_slowness_is_reported_before_it_is_acted_on() -> None:
    story = job(32)
    story.device["train_compute_seconds"] /= story.device["train_compute_seconds"][:100].mean(axis=0)
    (verdict,) = said(slow(story, 1.08, 14))
    assert verdict.node == "n2"
    assert verdict.confidence == CONFIDENCE_TOLD


def test_a_mild_slowness_within_what_nodes_differ_by_is_nothing() -> None:
    assert said(slow(job(), 1.04, 38)) == []


def test_twice_as_slow_is_found_soon_even_where_steps_are_noisy() -> None:
    (verdict,) = said(slow(job(noise=0.06), 2.0, 5))
    assert verdict.node == "n2"


def test_one_slow_step_is_a_hiccup() -> None:
    assert said(slow(job(), 2.0, 1)) == []


def test_one_very_slow_step_between_mild_ones_is_not_acted_on() -> None:
    story = slow(job(rows=100), 1.07, 3)
    story.device["train_compute_seconds"][-10:-5, 2] *= 3.3
    (verdict,) = said(waits(story))
    assert verdict.confidence == CONFIDENCE_TOLD


def test_steps_that_one_row_covers_are_one_report_of_them() -> None:
    window = slow(job(), 1.3, 4).window()
    steps = replace(window.steps, times_s=np.where(window.steps.number >= window.steps.number[-4], 980.0, 0.0))
    assert DETECTOR.detect(replace(window, steps=steps)) == []


def starved(story: Story) -> Story:
    """On each host some process waits for a processor nearly all the time."""
    story.node["node_cpu_pressure_ratio"] = np.full((len(story.times_s), len(story.nodes)), 0.97)
    return story


def test_where_hosts_lack_processors_slowness_that_may_be_chance_cannot_be_told() -> None:
    assert said(slow(job(), 1.5, 2))[0].confidence == CONFIDENCE_TOLD
    with pytest.raises(Blind, match="short of CPU"):
        said(starved(slow(job(), 1.5, 2)))


def test_scheduling_explains_noise_where_hosts_lack_processors() -> None:
    assert said(slow(job(noise=0.25), 6.0, 8))[0].confidence == CONFIDENCE_TOLD
    assert said(starved(slow(job(noise=0.25), 6.0, 8)))[0].confidence == CONFIDENCE_RIPE


def test_where_hosts_lack_processors_a_sure_straggler_is_named() -> None:
    (verdict,) = said(starved(slow(job(noise=0.1), 8.0, 8)))
    assert (verdict.node, verdict.confidence) == ("n2", CONFIDENCE_RIPE)


def test_two_steps_slower_than_all_others_are_reported_and_not_acted_on() -> None:
    (verdict,) = said(slow(job(), 1.2, 2))
    assert verdict.node == "n2"
    assert verdict.confidence == CONFIDENCE_TOLD


def test_what_is_reported_early_claims_no_cost_that_no_step_shows() -> None:
    story = slow(job(), 1.2, 2)
    story.device["train_step_seconds"][:] = STEP_S
    (verdict,) = said(story)
    assert (verdict.slowdown_ratio, verdict.asks) == (0.0, "none")


def test_a_little_is_not_told_before_the_jobs_pace_is_known() -> None:
    assert said(slow(job(rows=50), 1.2, 2)) == []


def test_a_sure_straggler_needs_no_past() -> None:
    assert said(slow(job(rows=50), 1.2, 4))[0].confidence == CONFIDENCE_EARLY


def test_two_slow_steps_of_a_rank_that_has_shown_such_before_are_a_hiccup() -> None:
    story = job()
    story.device["train_compute_seconds"][100:105, 2] *= 1.4
    assert said(slow(story, 1.2, 2)) == []


def test_a_slow_node_is_reported_as_soon_as_a_slow_gpu() -> None:
    story = slow(slow(job(), 1.2, 2), 1.2, 2, node=3)
    story.series = tuple(replace(one, node="n2", device=1) if one.node == "n3" else one for one in story.series)
    (verdict,) = said(story)
    assert verdict.node == "n2"


def test_packed_sequences_that_are_slow_for_two_steps_are_nothing() -> None:
    assert said(slow(job(16, noise=0.11), 1.6, 2)) == []


def test_twenty_percent_among_packed_sequences_is_found_within_25_steps() -> None:
    found = [said(slow(job(16, 600, noise=0.11, seed=seed), 1.25, 25)) for seed in range(8)]
    assert sum([v.node for v in one] == ["n2"] for one in found) >= 7


@pytest.mark.parametrize("seed", range(6))
def test_packed_sequences_alone_accuse_nobody(seed: int) -> None:
    story = job(16, 1200, noise=0.13, seed=seed)
    ends = range(300, 1200, 45)
    for end in ends:
        part = Story(nodes=16, rows=end)
        part.device = {name: values[:end].copy() for name, values in story.device.items()}
        assert said(part) == []


def test_short_noisy_steps_do_not_hide_for_how_long_it_has_been_slow() -> None:
    story = job(16, 600, noise=0.11)
    (verdict,) = said(slow(story, 1.3, 40))
    assert verdict.onset_s <= story.times_s[-15 * int(STEP_S)]


def test_noisy_slowness_that_is_over_is_nothing() -> None:
    story = job(16, 600, noise=0.11)
    story.device["train_compute_seconds"][-300:-60, 2] *= 1.5
    assert said(waits(story)) == []


def test_packed_work_that_is_told_explains_the_time() -> None:
    story = job(16, noise=0.0)
    rng = np.random.default_rng(5)
    work = np.repeat(np.exp(0.3 * rng.normal(size=(40, 16))), 5, axis=0)
    story.device["train_compute_seconds"] = story.device["train_compute_seconds"] * work
    story.device["train_work_units"] = work
    assert said(waits(story)) == []


def test_slowness_shows_beneath_packed_work_that_is_told() -> None:
    story = job(16, noise=0.0)
    work = np.repeat(np.exp(0.3 * np.random.default_rng(5).normal(size=(40, 16))), 5, axis=0)
    story.device["train_compute_seconds"] = story.device["train_compute_seconds"] * work
    story.device["train_work_units"] = work
    (verdict,) = said(slow(story, 1.2, 6))
    assert verdict.node == "n2"


def test_a_long_stage_is_nobodys_fault() -> None:
    story = job()
    story.device["train_compute_seconds"][:, 4:] *= 1.8
    assert said(waits(story), role_of=np.array([0, 0, 0, 0, 1, 1, 1, 1])) == []


def lone(story: Story, ratio: float = 1.3, steps: int = 24, node: int = 2) -> Story:
    """A rank is slow, all steps are longer for it, and nobody times collectives."""
    slow(story, ratio, steps, node)
    del story.device["nccl_collective_seconds"]
    return story


def test_what_began_with_the_window_is_one_kind_of_evidence() -> None:
    story = lone(job(rows=120))
    (verdict,) = said(story)
    assert verdict.kinds == {"compute_time"}
    assert verdict.confidence == CONFIDENCE_LONE
    assert "would" in verdict.summary


def test_a_rank_that_was_as_fast_as_its_peers_before_and_costs_time_is_slow() -> None:
    (verdict,) = said(lone(job()))
    assert verdict.kinds == {"compute_time", "own_history", "step_time"}
    assert verdict.confidence == CONFIDENCE_RIPE


def test_what_the_hook_alone_says_must_last_longer() -> None:
    story = lone(job(), steps=8)
    (verdict,) = said(story)
    assert verdict.confidence == CONFIDENCE_EARLY
    (verdict,) = said(working(lone(job(), steps=8), 40))
    assert verdict.kinds == {"compute_time", "own_history", "step_time", "gpu_activity"}
    assert verdict.confidence == CONFIDENCE_RIPE


def test_evidence_of_the_past_is_named_as_a_ratio_and_not_as_the_metric() -> None:
    (verdict,) = said(working(lone(job()), 40))
    shown = {item.metric: item for item in verdict.evidence if item.metric.endswith("_over_before")}
    assert shown.keys() > {"relative_compute_over_before"}
    assert all(item.value is not None and float(item.value) > 1 for item in shown.values())


def test_a_rank_that_always_was_the_slowest_has_not_changed() -> None:
    story = job()
    story.device["train_compute_seconds"][:, 2] *= 1.15
    (verdict,) = said(lone(story, 1.05))
    assert "own_history" not in verdict.kinds
    assert verdict.confidence == CONFIDENCE_LONE


def test_what_makes_no_step_longer_is_not_sure() -> None:
    story = lone(job())
    story.device["train_step_seconds"][:] = STEP_S
    (verdict,) = said(story)
    assert verdict.confidence == CONFIDENCE_LONE


@pytest.mark.parametrize("timed", [True, False])
def test_a_rank_whose_work_may_have_grown_is_reported(timed: bool) -> None:
    story = slow(job(16, 600, noise=0.11), 1.4, 40)
    if not timed:
        del story.device["nccl_collective_seconds"]
    (verdict,) = said(story)
    assert verdict.confidence < 0.9
    assert "train_work_units" in verdict.summary


def test_more_tokens_a_step_explain_more_time() -> None:
    story = lone(job())
    tokens = np.full(story.device["train_step"].shape, 4096.0)
    tokens[-120:, 2] *= 1.3
    story.device["train_tokens_per_second"] = tokens / story.device["train_step_seconds"]
    (verdict,) = said(story)
    assert verdict.confidence < 0.9


def packed_in_pairs(ratio: float = 1.0) -> Story:
    """Two ranks of each node get the same packed data; one of them, or both where ``ratio`` says so, becomes slow."""
    story = job(16, 600, noise=0.004)
    data = np.exp(0.12 * np.random.default_rng(8).normal(size=(120, 8)))
    story.device["train_compute_seconds"] *= np.repeat(np.repeat(data, 2, axis=1), 5, axis=0)
    story.series = tuple(replace(one, node=f"n{i // 2}", device=i % 2) for i, one in enumerate(story.series))
    story.nodes = story.nodes[:8]
    story.heard_s, story.farewell = story.heard_s[:8], story.farewell[:8]
    return slow(slow(story, 1.4, 40, node=4), ratio, 40, node=5)


def test_packed_data_do_not_explain_a_rank_whose_mate_has_the_same_and_is_not_slower() -> None:
    (verdict,) = said(packed_in_pairs())
    assert verdict.node == "n2"
    assert verdict.confidence == CONFIDENCE_RIPE
    (verdict,) = said(packed_in_pairs(1.4))
    assert verdict.confidence < 0.9


def working(story: Story, rows: int, node: int = 2, ratio: float = 0.8) -> Story:
    """For the newest rows all GPUs but one wait more than before."""
    story.hardware()
    for name in ("gpu_power_watts", "gpu_tensor_active_ratio"):
        others = np.arange(len(story.series)) != node
        story.device[name][-rows:, others] *= ratio
    return story


def test_a_gpu_that_idles_more_than_its_peers_is_not_at_work() -> None:
    story = working(lone(job(), steps=8), 40)
    story.device["gpu_utilization_ratio"][-40:, 2] = 0.6
    (verdict,) = said(story)
    assert "gpu_activity" not in verdict.kinds


def test_lateness_counts_beside_long_collectives() -> None:
    story = job(wait=8.0)
    (verdict,) = said(waits(slow(story, 1.2, 10), 8.0))
    assert "collective_arrival" in verdict.kinds


def test_two_peers_cannot_tell() -> None:
    with pytest.raises(Blind, match="comparable"):
        said(slow(job(nodes=2), 1.5, 10, node=1))


def test_two_slow_nodes_are_two_verdicts() -> None:
    story = slow(slow(job(), 1.3, 10), 1.3, 10, node=5)
    assert {v.node for v in said(story)} == {"n2", "n5"}


STAGES = np.arange(8) // 4  # two pipeline stages, with the same data on n0 and n4, n1 and n5, ...


@pytest.mark.parametrize("other", [5, 6])
def test_ranks_of_two_stages_that_have_the_same_data_are_slow_by_it_and_others_by_themselves(other: int) -> None:
    story = slow(slow(job(noise=0.004), 1.3, 10, node=1), 1.35, 10, node=other)
    found = [(verdict.fault, verdict.node) for verdict in said(story, role_of=STAGES)]
    if other == 5:
        assert found == [("workload_imbalance", None)]
    else:
        assert found == [("straggler", "n1"), ("straggler", "n6")]


def test_one_slow_slice_of_the_data_is_one_notice_that_names_all_who_have_it() -> None:
    (verdict,) = said(slow(slow(job(noise=0.004), 1.3, 10, node=1), 1.35, 10, node=5), role_of=STAGES)
    assert verdict.nodes == ("n1", "n5")
    assert verdict.asks is None  # what work that is uneven asks for: a notice
    assert "it has more work, no node is slow" in verdict.summary


def test_a_slow_rank_whose_data_make_nobody_else_slow_is_slow_itself() -> None:
    (verdict,) = said(slow(job(noise=0.004), 1.3, 10, node=1), role_of=STAGES)
    assert (verdict.fault, verdict.node) == ("straggler", "n1")


@pytest.mark.parametrize(("others", "sure"), [([0.0, 0.0, 0.0], True), ([0.06, -0.05, 0.05], False)])
def test_a_rank_that_is_not_much_farther_off_than_others_is_not_surely_slow(others: list[float], sure: bool) -> None:
    story = job(nodes=12, noise=0.004)
    compute = story.device["train_compute_seconds"]
    compute *= 3.0 / compute.mean(axis=0)  # most are alike: the median deviation sees no more than these
    compute[:, [3, 7, 11]] *= 1 + np.array(others)
    compute[:, 2] *= 1.1
    certain = [verdict.node for verdict in said(waits(story)) if verdict.confidence >= CONFIDENCE_EARLY]
    assert certain == (["n2"] if sure else [])


def test_a_slow_warm_up_of_all_is_no_slow_node() -> None:
    story = job()
    story.device["train_compute_seconds"][:40] *= 3
    assert said(waits(story)) == []


def test_gaps_in_a_nodes_rows_accuse_nobody() -> None:
    story = job()
    for values in story.device.values():
        values[100:140, 2] = np.nan
    assert said(story) == []


def test_a_stage_with_some_time_to_spare_costs_what_the_pace_shows() -> None:
    story = slow(job(), 1.6, 12)
    rows = int(12 * STEP_S)
    story.device["train_step_seconds"][:-rows] = 5.0
    story.device["train_step_seconds"][-rows:] = 5.15
    (verdict,) = said(story)
    assert verdict.slowdown_ratio == pytest.approx(0.03, abs=0.005)


def remembered(kept: float = 0.85, stumble: float = 0.0) -> Story:
    """A job whose steps' noise stays, for the larger part, for the next step; one node has stumbled long ago."""
    story = job(rows=400, noise=0.0)
    rng, steps = np.random.default_rng(8), np.arange(400) // int(STEP_S)
    course = np.zeros((steps[-1] + 1, 8))
    for step in range(1, len(course)):
        course[step] = kept * course[step - 1] + np.sqrt(1 - kept**2) * 0.005 * rng.normal(size=8)
        course[step, 5] += stumble * (step == 30)
    story.device["train_compute_seconds"] *= np.exp(course)[steps]
    return waits(story)


def test_where_noise_stays_slow_steps_are_one_stumble_and_others_have_stumbled_as_far() -> None:
    (verdict,) = said(slow(remembered(stumble=0.15), 1.15, 8))
    assert verdict.confidence == CONFIDENCE_TOLD
    (verdict,) = said(slow(remembered(kept=0.0, stumble=0.15), 1.15, 8))
    assert verdict.confidence == CONFIDENCE_RIPE


@pytest.mark.parametrize(("ratio", "steps"), [(1.6, 8), (1.15, 40)], ids=["far off", "lasting"])
def test_beyond_all_that_a_stumble_does_it_is_sure(ratio: float, steps: int) -> None:
    (verdict,) = said(slow(remembered(stumble=0.15), ratio, steps))
    assert verdict.confidence == CONFIDENCE_RIPE


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.6, 0.85])
def test_how_long_noise_stays_is_seen(kept: float) -> None:
    assert memory(remembered(kept).window(), 0) == pytest.approx(kept, abs=0.2)


def test_how_long_noise_stays_is_not_known_of_a_few_steps() -> None:
    assert memory(job(rows=40).window(), 0) == MEMORY_UNKNOWN


@pytest.mark.parametrize(("capped", "asks"), [(["n2"], None), (["n2", "n3"], "notify")])
def test_what_a_power_limit_that_nodes_share_costs_is_not_the_nodes(capped: list[str], asks: str | None) -> None:
    story = slow(job(), 1.2, 8)
    limits = [600.0 if series.node in capped else 700.0 for series in story.series]
    story.device["gpu_power_limit_watts"] = np.tile(limits, (len(story.times_s), 1))
    (verdict,) = said(story)
    assert (verdict.node, verdict.asks) == ("n2", asks)


def test_ranks_with_the_same_data_that_became_slower_before_it_was_noticed_show_no_equal_work() -> None:
    """All of a node's ranks get longer documents, of changing length; most of it lies before the onset."""
    story = Story(nodes=3, gpus=4, rows=120)
    compute = np.ones((120, 12)) * np.exp(0.01 * np.random.default_rng(5).normal(size=(120, 12)))
    documents = np.where(np.arange(120) % 3 == 0, 1.0, 1.5)
    compute[20:, 8:] *= documents[20:, None]
    story.device["train_step"] = np.repeat(1.0 + np.arange(120.0)[:, None], 12, axis=1)
    story.device["train_compute_seconds"] = compute
    window = story.window()
    assert not even_work(window, 8, len(window.steps.number) - 30)


@pytest.mark.parametrize(
    ("times", "noise", "told", "even"),
    [
        (8.0, 0.15, False, True),
        (2.0, 0.15, False, False),
        (8.0, 0.35, False, False),
        (2.0, 0.1, True, True),
        (1.5, 0.15, True, False),
        (8.0, 0.35, True, True),
    ],
)
def test_work_that_differs_a_little_does_not_explain_a_rank_that_is_many_times_as_slow(
    times: float, noise: float, told: bool, even: bool
) -> None:
    story = slow(job(noise=noise), times, 8)
    if told:
        work = np.exp(0.3 * np.random.default_rng(8).normal(size=story.device["train_compute_seconds"].shape))
        story.device["train_work_units"] = 16.0 * work
        story.device["train_compute_seconds"] *= work
    window = story.window()
    assert even_work(window, 2, len(window.steps.number) - 8) is even


@pytest.mark.parametrize(("times", "even"), [(1.3, False), (2.0, True)])
def test_peers_whose_levels_lie_apart_all_along_may_have_unequal_work(times: float, even: bool) -> None:
    story = job(nodes=16)
    story.device["train_compute_seconds"] *= 1 + 0.08 * np.random.default_rng(4).normal(size=16)
    window = slow(story, times, 20).window()
    assert even_work(window, 2, len(window.steps.number) - 20) is even


@pytest.mark.parametrize(("kept", "even"), [(0.0, True), (0.9, False)])
def test_ranks_that_wander_alike_by_chance_need_not_have_the_same_data(kept: float, even: bool) -> None:
    """Two of 160 ranks share their data, or all wander for themselves and some alike; forty steps tell which."""
    story = job(nodes=160, rows=260)
    drawn = np.random.default_rng(5).normal(size=(52, 160))
    for step in range(1, len(drawn)):
        drawn[step] = kept * drawn[step - 1] + np.sqrt(1 - kept**2) * drawn[step]
    if not kept:
        drawn[:, 3] = drawn[:, 2]
    story.device["train_compute_seconds"] = 3.0 * np.exp(0.05 * np.repeat(drawn, 5, axis=0))
    window = slow(story, 1.5, 8).window()
    assert even_work(window, 2, len(window.steps.number) - 8) is even


def test_reported_work_that_is_the_same_everywhere_explains_no_differences() -> None:
    """An expert that many tokens go to has more work than the tokens of its rank say."""
    story = slow(job(noise=0.1), 2.0, 8)
    story.device["train_work_units"] = np.full_like(story.device["train_compute_seconds"], 16.0)
    window = story.window()
    assert not even_work(window, 2, len(window.steps.number) - 8)


@pytest.mark.parametrize(
    ("steps", "noise", "kept", "even"),
    [(34, 0.13, 0.0, False), (34, 0.02, 0.0, True), (8, 0.06, 0.0, False), (8, 0.025, 0.85, True)],
    ids=["packed", "fixed length", "experts", "machines with a memory"],
)
def test_reports_of_several_short_steps_show_that_work_is_uneven_by_less(
    steps: int, noise: float, kept: float, even: bool
) -> None:
    """A row each 15 s holds the mean of 34 steps: where single ones differ by 13%, their means differ by 2.2%."""
    rows = 100
    story = Story(nodes=8, rows=rows)
    drawn = np.random.default_rng(7).normal(size=(rows * steps, 8))
    for step in range(1, len(drawn)):
        drawn[step] = kept * drawn[step - 1] + np.sqrt(1 - kept**2) * drawn[step]
    single = np.exp(noise * drawn).reshape(rows, steps, 8)
    story.device = {
        "train_step": np.repeat(steps * np.arange(1.0, rows + 1)[:, None], 8, axis=1),
        "train_step_seconds": np.full((rows, 8), 15.0 / steps),
        "train_compute_seconds": 12.0 / steps * single.mean(axis=1),
    }
    story.device["train_compute_seconds"][-20:, 2] *= 1.5
    story.times_s = story.times_s[-1] - 15.0 * np.arange(rows - 1, -1, -1)
    window = story.window(interval_s=15.0)
    slow_since = int(np.searchsorted(window.steps.times_s, story.times_s[-20] - 7.5))
    assert even_work(window, 2, slow_since) is even


def test_a_rank_whose_work_is_told_and_explains_too_little_is_not_asked_for_it_again() -> None:
    story = slow(job(noise=0.15), 1.5, 30)
    story.device["train_work_units"] = np.full_like(story.device["train_compute_seconds"], 16.0)
    (verdict,) = said(story)
    assert "may not be what train_work_units says" in verdict.summary


def packed_and_told(waits_for_it: bool) -> Story:
    """Packed data whose work is told; a rank is slow in the last 60 steps, and steps wait for it or do not."""
    story = job(nodes=12, rows=600, noise=0.004)
    steps = np.arange(600) // int(STEP_S)
    units = np.exp(0.25 * np.random.default_rng(11).normal(size=(120, 12)))[steps]
    story.device["train_work_units"] = units
    story.device["train_compute_seconds"] *= units
    slow(story, 1.4, 60)
    if not waits_for_it:
        others = np.delete(story.device["train_compute_seconds"], 2, axis=1).max(axis=1, keepdims=True)
        story.device["train_step_seconds"] = np.repeat(STEP_S - 3.0 + others, 12, axis=1)
    return story


def test_where_every_step_has_other_work_the_cost_shows_in_the_steps_that_waited() -> None:
    story = packed_and_told(waits_for_it=True)
    compute = story.device["train_compute_seconds"][-300:]
    others = np.delete(compute, 2, axis=1).max(axis=1)
    extra = np.maximum(compute[:, 2] - others, 0).mean() / (STEP_S - 3.0 + others).mean()
    (verdict,) = said(story)
    assert verdict.slowdown_ratio == pytest.approx(extra, rel=0.25)
    assert verdict.asks is None


def test_where_every_step_has_other_work_and_none_waited_nothing_is_asked() -> None:
    verdicts = said(packed_and_told(waits_for_it=False))
    assert [verdict.asks for verdict in verdicts] in ([], ["none"])


@pytest.mark.parametrize(("steps", "confidence"), [(8, CONFIDENCE_TOLD), (12, CONFIDENCE_RIPE)])
def test_a_stumble_of_one_step_says_nothing_of_slowness_that_lasts(steps: int, confidence: float) -> None:
    story = remembered(kept=0.55)
    story.device["train_compute_seconds"][150:155, 5] *= 3.0
    (verdict,) = said(slow(story, 1.15, steps))
    assert verdict.confidence == confidence
