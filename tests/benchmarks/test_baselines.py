"""The published baselines do what their papers say, on data made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.detection.baselines import lstm_vae
from benchmarks.detection.baselines.bocd import Bocd
from benchmarks.detection.baselines.greyhound import Greyhound, first_period, iterations
from benchmarks.detection.baselines.isolation_forest import ForestOfNodes
from benchmarks.detection.baselines.minder import Minder, dissimilarities, first_alert
from benchmarks.detection.baselines.minder_metrics import learn_order
from benchmarks.detection.baselines.protocol import Accusation, Baseline, runs
from benchmarks.detection.baselines.zscore import ZScore, z_scores
from benchmarks.detection.matrix import Floats, TraceMatrix
from eagle_eye.server.backtest.trace import Label
from tests.benchmarks.matrices import START_S, matrix, noisy

POWER, TENSOR = "gpu_power_watts", "gpu_tensor_active_ratio"


def powered(lines: int = 200, nodes: int = 8, seed: int = 0, since: int | None = None) -> TraceMatrix:
    """A job whose node n3 draws a third of the power from line ``since`` on."""
    values = {POWER: noisy(600.0, lines, nodes, seed), TENSOR: noisy(0.5, lines, nodes, seed + 1)}
    labels = []
    if since is not None:
        values[POWER][since:, 3] /= 3
        labels = [Label(START_S + since, START_S + lines, ["n3"], "power_throttle", "exclude")]
    return matrix(values, labels)


class TestChangePoints:
    def test_a_known_change_of_mean_is_found_where_it_is(self) -> None:
        samples = np.concatenate([np.full(60, 10.0), np.full(40, 11.5)])
        samples *= 1 + 0.01 * np.random.default_rng(0).standard_normal(100)
        (change,) = Bocd().changes(samples)
        assert change.began == 60
        assert change.found <= 63

    def test_a_steady_series_has_none(self) -> None:
        samples = 10.0 * (1 + 0.02 * np.random.default_rng(1).standard_normal(300))
        assert Bocd().changes(samples) == []

    def test_the_unit_does_not_matter(self) -> None:
        samples = np.concatenate([np.full(30, 2.0), np.full(30, 3.0)])
        assert Bocd().changes(samples) == Bocd().changes(1000 * samples)

    def test_nothing_is_found_in_nothing(self) -> None:
        assert Bocd().changes(np.zeros(0)) == []


class TestMinder:
    def test_the_distance_names_the_deviating_machine(self) -> None:
        windows = np.zeros((5, 6, 8))
        windows[:, 4] = 0.5
        assert dissimilarities(windows).argmax(axis=1).tolist() == [4] * 5

    def test_distances_are_euclidean_summed_and_divided_by_the_size_of_the_cluster(self) -> None:
        windows = np.array([[[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]]])
        assert dissimilarities(windows)[0] == pytest.approx([5 / 3, 10 / 3, 5 / 3])

    def test_continuity_must_be_exceeded(self) -> None:
        trace = powered(lines=20)
        machine, far = np.full(20, 2), np.full(20, 1.0)
        alert = first_alert(machine, far, trace.times_s, trace, {"similarity": 0.5, "continuity_s": 10.0})
        assert alert == Accusation(trace.times_s[11], "n2")

    def test_another_candidate_starts_the_continuity_anew(self) -> None:
        trace = powered(lines=20)
        machine, far = np.full(20, 2), np.full(20, 1.0)
        machine[9] = 1
        assert first_alert(machine, far, trace.times_s, trace, {"similarity": 0.5, "continuity_s": 10.0}) is None

    @pytest.mark.slow
    def test_the_machine_that_lost_power_is_accused_and_healthy_ones_are_not(self) -> None:
        minder = Minder(paper=False, steps_max=500)
        minder.fit([powered(seed=s) for s in (10, 20)], [powered(seed=30, since=100)])
        setting = [{"similarity": 0.4, "continuity_s": 30.0}]
        ((found,),) = minder.judge_each(powered(seed=40, since=100), setting)
        assert found.node == "n3"
        assert START_S + 130 < found.time_s < START_S + 145
        assert minder.judge_each(powered(seed=50), setting) == [[]]

    def test_the_tree_puts_the_telling_metric_first(self) -> None:
        assert learn_order([powered(seed=s, since=100) for s in range(4)], 8)[0] == "gpu_power_draw"

    def test_without_labels_the_published_order_stands(self) -> None:
        assert learn_order([powered()], 8)[0] == "pfc_tx_packet_rate"

    def test_training_is_deterministic(self) -> None:
        windows = np.random.default_rng(0).random((64, 8))
        first, second = (lstm_vae.train(windows, seed=3, steps_max=20)(windows) for _ in range(2))
        assert np.array_equal(first, second)


class TestGreyhound:
    def slow(self, since: int = 60, lines: int = 120, ratio: float = 1.5) -> TraceMatrix:
        compute = np.full((lines, 4), 0.6)
        compute[since:, 2] *= ratio
        step = np.repeat(np.arange(1.0, lines + 1)[:, None], 4, axis=1)
        seconds = np.repeat(compute.max(axis=1, keepdims=True) + 0.4, 4, axis=1)
        jitter = 1 + 0.005 * np.random.default_rng(0).standard_normal((lines, 1))
        return matrix({"train_step": step, "train_step_seconds": seconds * jitter, "train_compute_seconds": compute})

    def test_the_node_that_slowed_the_job_is_accused_after_the_change(self) -> None:
        (found,) = Greyhound().judge(self.slow())
        assert found.node == "n2"
        assert START_S + 60 < found.time_s < START_S + 80

    def test_a_change_below_ten_percent_is_nobodys_fault(self) -> None:
        assert Greyhound().judge(self.slow(ratio=1.1)) == []

    def test_the_first_period_is_found_by_autocorrelation(self) -> None:
        beat = np.tile([0.0, 0.0, 40.0, 5.0, 0.0, 3.0, 0.0], 30)
        assert first_period(beat) == 7

    def test_noise_has_no_period(self) -> None:
        assert first_period(np.random.default_rng(0).standard_normal(200)) is None

    def test_iterations_are_counted_from_collectives_where_no_step_is_reported(self) -> None:
        calls = np.cumsum(np.tile([0.0, 0.0, 40.0, 5.0, 0.0], 30))
        _, seconds = iterations(matrix({"nccl_sequence": np.repeat(calls[:, None], 3, axis=1)}))
        assert seconds == pytest.approx(np.full(len(seconds), 5.0))

    def test_without_steps_and_collectives_it_sees_nothing(self) -> None:
        assert Greyhound().judge(powered(since=100)) == []


class TestZScore:
    def test_the_node_far_from_the_others_is_accused_when_it_has_lasted(self) -> None:
        setting = [{"k": 2.0, "persistence_s": 30.0}]
        assert ZScore().judge_each(powered(since=100), setting) == [[Accusation(START_S + 130, "n3")]]

    def test_nobody_exceeds_the_largest_z_score_that_so_few_nodes_allow(self) -> None:
        values = np.zeros((1, 4))
        values[0, 0] = 1000.0
        assert z_scores(values).max() == pytest.approx(3 / np.sqrt(4) * 2 / np.sqrt(3))

    def test_what_was_not_observed_is_not_far_off(self) -> None:
        assert z_scores(np.array([[1.0, np.nan, 1.0]])).tolist() == [[0.0, 0.0, 0.0]]


def test_the_isolation_forest_accuses_the_node_that_lost_power() -> None:
    forest = ForestOfNodes(trees=50)
    forest.fit([powered(lines=400, seed=s) for s in (10, 20)], [])
    ((found,),) = forest.judge_each(powered(lines=400, seed=30, since=200), [{"quantile": 1e-2, "persistence_s": 60.0}])
    assert found.node == "n3"


@pytest.mark.parametrize("baseline", [Minder(), Minder(paper=False), Greyhound(), ZScore(), ForestOfNodes()])
def test_every_baseline_has_the_same_tuning_effort(baseline: Baseline) -> None:
    assert len(baseline.grid) == 12


def test_runs_are_unbroken_stretches() -> None:
    assert list(runs(np.array([True, False, True, True]))) == [(0, 1), (2, 4)]


def test_a_gap_is_filled_with_what_came_before() -> None:
    values: Floats = np.array([[np.nan], [1.0], [np.nan], [3.0], [np.nan]])
    held = matrix({POWER: values}).held(POWER)
    assert held is not None
    assert held[:, 0].tolist() == [1.0, 1.0, 1.0, 3.0, 3.0]
