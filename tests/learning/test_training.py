"""What is exported says the same as what was trained, a calibrated rate holds on fresh nodes, drift is found."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from eagle_eye.detectors.learned.model_anomaly import Learned
from eagle_eye.detectors.signs.learned_model import LearnedModel, forward, isolation
from eagle_eye.learning import learners
from eagle_eye.learning.features import HealthyHistory, NoHistory, candidates, observed, shape_for
from eagle_eye.learning.model import (
    CHECK,
    HealthyCheck,
    TooShort,
    check,
    independence,
    lasting,
    make,
    no_worse,
    parts,
    peaks,
    poisson_at_most,
    scaling,
    tail,
)
from tests.learning.builders import START_S, Fleet

EPOCHS = 12


@pytest.fixture(scope="module")
def history() -> HealthyHistory:
    return Fleet(seed=1, hours=12).history()


@pytest.fixture(scope="module")
def made(history: HealthyHistory) -> tuple[LearnedModel, HealthyCheck]:
    return make(history, seed=0, epochs=EPOCHS)


@pytest.fixture(scope="module")
def model(made: tuple[LearnedModel, HealthyCheck]) -> LearnedModel:
    return made[0]


def inputs(rows: int = 600, width: int = 12) -> np.ndarray:
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(rows, 3)) @ rng.normal(size=(3, width))
    return (hidden + 0.1 * rng.normal(size=(rows, width))).astype(np.float32)


class TestExport:
    def test_numpy_reconstructs_what_torch_reconstructs(self) -> None:
        values = inputs()
        network = learners.train_autoencoder(values, seed=0, epochs=2)
        with torch.no_grad():
            theirs = network(torch.from_numpy(values)).numpy()
        assert np.abs(forward(learners.exported_autoencoder(network), values) - theirs).max() < 1e-5

    def test_numpy_isolates_as_scikit_learn_does(self) -> None:
        values = np.abs(inputs())
        grown = learners.grow_forest(values, seed=0, trees=20)
        ours = isolation(learners.exported_forest(grown), values)
        assert np.abs(ours + grown.score_samples(values)).max() < 1e-5

    def test_the_same_seed_gives_the_same_weights_and_leaves_torch_as_it_was(self) -> None:
        values = inputs()
        torch.manual_seed(7)
        before = torch.random.get_rng_state()
        first, second = (
            learners.exported_autoencoder(learners.train_autoencoder(values, 3, epochs=2)) for _ in range(2)
        )
        assert all(np.array_equal(a.weight, b.weight) for a, b in zip(first, second, strict=True))
        assert torch.equal(before, torch.random.get_rng_state())

    def test_the_covariance_is_not_moved_by_a_tenth_of_outliers(self) -> None:
        values = inputs(width=6).astype(np.float64)
        spoiled = values.copy()
        spoiled[:50] += 30.0
        assert (
            np.abs(learners.fit_covariance(spoiled, 0).location - learners.fit_covariance(values, 0).location).max()
            < 0.5
        )


class TestCalibration:
    def test_a_tail_promises_no_fewer_alarms_than_there_are(self) -> None:
        rng = np.random.default_rng(0)
        series, number = np.repeat(np.arange(20), 1440), np.tile(np.arange(1440), 20)
        known = tail(rng.exponential(size=28_800), series, number, 60.0, np.arange(20))
        fresh = rng.exponential(size=288_000)
        series, number = np.repeat(np.arange(200), 1440), np.tile(np.arange(1440), 200)
        for level in (5.0, 7.0, 9.0):
            seen = len(peaks(fresh, series, number, level)[0]) / 200.0
            assert seen <= known.alarms_per_node_day(np.array([level]))[0] < 5 * seen + 0.1

    def test_a_few_faults_in_history_do_not_make_the_tail_deaf(self) -> None:
        rng = np.random.default_rng(0)
        series, number = np.repeat(np.arange(20), 1440), np.tile(np.arange(1440), 20)
        scores = rng.exponential(size=28_800)
        spoiled = scores.copy()
        spoiled[3000:3060] = spoiled[20_000:20_030] = 40.0
        clean, dirty = (tail(s, series, number, 60.0, np.arange(20)) for s in (scores, spoiled))
        assert dirty.alarms_per_node_day(np.array([15.0]))[0] < 10 * clean.alarms_per_node_day(np.array([12.0]))[0]

    def test_a_run_is_one_peak(self) -> None:
        scores = np.array([0.0, 5.0, 7.0, 6.0, 0.0, 5.5, 0.0])
        found, whose = peaks(scores, np.zeros(7, np.intp), np.arange(7), 4.0)
        assert (found.tolist(), whose.tolist()) == ([7.0], [0])

    def test_runs_of_two_nodes_are_two_peaks(self) -> None:
        found, _ = peaks(np.array([5.0, 6.0]), np.array([0, 1]), np.array([0, 0]), 4.0)
        assert sorted(found.tolist()) == [5.0, 6.0]

    def test_a_score_counts_that_has_lasted(self) -> None:
        scores = np.array([1.0, 9.0, 8.0, 7.0, 2.0])
        lowest = lasting(scores, np.zeros(5, np.intp), np.array([0, 1, 2, 3, 5]), looks=3)
        assert np.isnan(lowest[[0, 1, 4]]).all()
        assert lowest[[2, 3]].tolist() == [1.0, 7.0]

    def test_peaks_of_one_odd_node_are_little_evidence(self) -> None:
        groups = np.repeat(np.arange(5), 20)
        rng = np.random.default_rng(0)
        assert independence(rng.normal(size=100), groups) > 0.6
        assert independence(rng.normal(size=100) + 10 * groups, groups) < 0.1

    def test_a_short_history_is_refused(self) -> None:
        with pytest.raises(TooShort, match="longer history"):
            tail(np.arange(50.0), np.zeros(50, np.intp), np.arange(50), 60.0, np.zeros(1, np.intp))

    def test_poisson_bound(self) -> None:
        assert poisson_at_most(5.0, 0.99) == 11


class TestModel:
    @pytest.mark.slow
    def test_fresh_healthy_nodes_raise_no_more_alarms_than_promised(self, model: LearnedModel) -> None:
        fresh = Fleet(seed=2, hours=12).history()
        found = check(model, fresh, np.ones(len(fresh.features), np.bool_))
        assert found.passed
        assert found.at_default == 0

    def test_the_part_kept_back_was_judged_as_promised(self, made: tuple[LearnedModel, HealthyCheck]) -> None:
        assert made[1].passed

    def test_finds_a_node_that_drifts_in_two_metrics_that_no_rule_watches(self, model: LearnedModel) -> None:
        since_s = START_S + 7200.0
        fleet = Fleet(seed=3, hours=3).drift("n5", since_s)
        detector = Learned(model=model, alarms_per_1000_node_days=1.0)
        assert all(detector.detect(fleet.window(t)) == [] for t in np.arange(since_s - 1800, since_s, 60.0))
        (verdict,) = detector.detect(fleet.window(since_s + 600.0))
        assert verdict.node == "n5"
        assert {e.metric for e in verdict.evidence[:2]} == {"node_memory_used_ratio", "gpu_dram_active_ratio"}

    def test_nodes_stay_in_their_part(self, history: HealthyHistory) -> None:
        shares = [set(parts(history, 0)[history.node == node]) for node in range(len(history.nodes))]
        assert all(len(share) == 1 for share in shares)
        assert 0.1 < float((parts(history, 0) == CHECK).mean()) < 0.3

    def test_few_nodes_are_parted_by_time(self) -> None:
        few = Fleet(seed=1, nodes=4, hours=1).history()
        part = parts(few, 0)
        assert float(few.times_s[part == CHECK].min()) >= float(few.times_s[part != CHECK].max())

    def test_the_spread_of_few_nodes_is_trusted_less(self) -> None:
        features = np.random.default_rng(0).normal(size=(500, 2, 3)) * 10
        assert (scaling(features, 5)[1][:, 0] > 1.5 * scaling(features, 500)[1][:, 0]).all()

    def test_too_short_a_history_is_refused(self, history: HealthyHistory) -> None:
        few = dataclasses.replace(
            history,
            **{n: getattr(history, n)[:100] for n in ("features", "node", "run", "number", "times_s")},
        )
        with pytest.raises(NoHistory, match="are needed"):
            make(few, 0, epochs=1)

    def test_a_model_that_raises_more_alarms_may_not_replace(self) -> None:
        good = HealthyCheck(10.0, 0.5, 5.0, 4, 0)
        assert no_worse(good, HealthyCheck(10.0, 0.5, 5.0, 3, 0))
        assert not no_worse(good._replace(seen=30), good)
        assert not no_worse(good._replace(at_default=3), good)


class TestShape:
    def test_what_training_says_of_itself_is_not_learned(self) -> None:
        names = {metric.name for metric in candidates()}
        assert not any(name.startswith(("train_", "nccl_")) for name in names)
        assert "node_memory_used_ratio" in names

    def test_rows_of_a_minute_get_longer_spans_and_fewer_looks(self) -> None:
        shape = shape_for(60.0, 900.0)
        assert (shape.view.span_s, shape.looks) == (240.0, 2)

    def test_rows_of_many_minutes_are_refused(self) -> None:
        with pytest.raises(NoHistory, match=r"detection\.window_s"):
            shape_for(600.0, 900.0)

    def test_a_metric_that_few_looks_have_is_not_learned(self, history: HealthyHistory) -> None:
        holed = dataclasses.replace(history, features=history.features.copy())
        holed.features[: len(holed.features) // 2, 0] = np.nan
        assert history.shape.view.metrics[0] not in observed(holed, 0.8)
