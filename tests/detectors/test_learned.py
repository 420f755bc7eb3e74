"""What a model of healthy nodes finds strange, and what it must leave alone or cannot tell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from eagle_eye.detectors.learned.model_anomaly import NO_MODEL, Learned
from eagle_eye.detectors.signs.learned_features import Metric, View, look, oddest_of_each
from eagle_eye.detectors.types import Blind, Verdict, Window
from tests.detectors.tiny_model import METRICS, tiny_model
from tests.detectors.windows import NOW_S, Story


def detect(window: Window, **changes: Any) -> list[Verdict]:
    return Learned(model=tiny_model(**changes), alarms_per_1000_node_days=1.0).detect(window)


def job(nodes: int = 8, gpus: int = 1) -> Story:
    return Story(nodes=nodes, gpus=gpus).hardware()


def strange(rows: int = 40, node: int = 1) -> Story:
    story = job()
    story.node["node_memory_used_ratio"][-rows:, node] += 0.3
    story.device["gpu_power_watts"][-rows:, node] -= 150.0
    return story


def several(nodes: int, odd: Iterable[int]) -> Story:
    story = job(nodes)
    for node in odd:
        story.node["node_memory_used_ratio"][-40:, node] += 0.3
        story.device["gpu_power_watts"][-40:, node] -= 150.0
    return story


def blind(window: Window, match: str, **changes: Any) -> None:
    with pytest.raises(Blind, match=match):
        detect(window, **changes)


class TestFinds:
    def test_names_the_node_and_the_metrics_that_make_it_strange(self) -> None:
        (verdict,) = detect(strange().window())
        assert (verdict.node, verdict.fault) == ("n1", "node_anomaly")
        assert {"node_memory_used_ratio", "gpu_power_watts"} <= {e.metric for e in verdict.evidence}

    def test_only_asks_for_a_look(self) -> None:
        (verdict,) = detect(strange().window())
        assert verdict.asks == "notify"
        assert not verdict.fact
        assert verdict.kinds == {"learned"}
        assert verdict.confidence < 0.9

    def test_evidence_gives_the_nodes_value_its_peers_and_the_edge_of_the_healthy_range(self) -> None:
        (verdict,) = detect(strange().window())
        memory = next(e for e in verdict.evidence if e.metric == "node_memory_used_ratio")
        assert isinstance(memory.value, float)
        assert memory.peers_median is not None
        assert memory.threshold is not None
        assert memory.value == pytest.approx(0.7, abs=0.03)
        assert memory.peers_median == pytest.approx(0.4, abs=0.02)
        assert memory.peers_median < memory.threshold < memory.value

    def test_knows_when_it_began(self) -> None:
        (verdict,) = detect(strange(rows=30).window())
        assert NOW_S - 40 <= verdict.onset_s <= NOW_S - 20

    def test_the_rarer_a_score_the_surer_the_claim(self) -> None:
        confidences = []
        for ratio in (1.0, 1.5, 2.0):
            first, second, third = (
                tail._replace(peaks_per_node_day=ratio * tail.peaks_per_node_day) for tail in tiny_model().tails
            )
            (verdict,) = detect(strange().window(), tails=(first, second, third))
            confidences.append(verdict.confidence)
        assert confidences == sorted(set(confidences), reverse=True)


class TestLeavesAlone:
    def test_healthy_nodes(self) -> None:
        assert detect(job().window()) == []

    def test_what_moves_for_the_whole_job(self) -> None:
        story = job()
        story.node["node_memory_used_ratio"][-40:] += 0.3
        story.device["gpu_power_watts"][-40:] -= 150.0
        assert detect(story.window()) == []

    def test_what_has_lasted_for_one_span_only(self) -> None:
        assert detect(strange(rows=8).window()) == []

    def test_one_burst(self) -> None:
        story = job()
        story.node["node_memory_used_ratio"][-5, 1] = 1.0
        story.device["gpu_power_watts"][-5, 1] = 100.0
        assert detect(story.window()) == []

    def test_what_only_one_of_three_scores_finds(self) -> None:
        tails = tiny_model().tails
        deaf = (tails[0], tails[1]._replace(threshold=2.0), tails[2]._replace(threshold=50.0))
        assert detect(strange().window(), tails=deaf) == []

    def test_a_node_of_another_role(self) -> None:
        story = job()
        story.node["node_memory_used_ratio"][:, 4:] += 0.3
        story.device["gpu_power_watts"][:, 4:] -= 150.0
        assert detect(story.window(role_of=np.array([0, 0, 0, 0, 1, 1, 1, 1]))) == []


class TestCannotTell:
    def test_without_a_model_it_says_how_to_get_one(self) -> None:
        with pytest.raises(Blind, match="eagle-eye train"):
            Learned(model=None, alarms_per_1000_node_days=1.0, without=NO_MODEL).detect(job().window())

    def test_metrics_that_nobody_reports_any_more(self) -> None:
        story = strange()
        del story.node["node_cpu_utilization_ratio"]
        blind(story.window(), "node_cpu_utilization_ratio.*no node of this job reports")

    def test_other_hardware(self) -> None:
        story = strange()
        story.device["gpu_power_limit_watts"][:] = 400.0
        blind(story.window(), "700 W, these have 400 W")

    def test_nodes_of_another_size(self) -> None:
        blind(job(gpus=4).window(), "nodes of 1, 8 GPUs, not of 4")

    def test_rows_of_another_interval(self) -> None:
        blind(strange().window(interval_s=10.0), "rows of 1 s, not of 10 s")

    def test_while_the_job_starts(self) -> None:
        blind(Story(nodes=8, rows=15).hardware().window(), "the model needs")

    def test_while_no_step_finishes(self) -> None:
        story = strange().standstill(20)
        blind(story.window(), "no step has finished")

    def test_during_a_checkpoint(self) -> None:
        story = strange()
        story.phase[0] = "checkpoint"
        blind(story.window(), "checkpoint")

    def test_without_comparable_peers(self) -> None:
        blind(job(nodes=2).window(), "comparable peers")

    def test_when_many_nodes_are_strange_the_job_is(self) -> None:
        blind(several(12, (1, 5, 9)).window(), "3 of 12 nodes")

    def test_when_two_are_strange_alike_they_share_a_cause(self) -> None:
        blind(several(12, (1, 5)).window(), "2 nodes are strange in the same metrics")

    def test_when_half_of_a_room_differs_from_the_other_nobody_is_strange(self) -> None:
        assert detect(several(12, range(6)).window()) == []


class TestFeatures:
    VIEW = View(metrics=METRICS, span_s=10.0, past_s=15.0)

    def test_a_node_is_as_odd_as_its_oddest_device(self) -> None:
        story = job(nodes=8, gpus=4)
        story.device["gpu_power_watts"][-10:, 6] -= 200.0
        level = look(story.window(), self.VIEW, NOW_S).values[:, 0, 0]
        assert int(np.argmin(level)) == 1
        assert level[1] < -20

    def test_devices_may_come_in_any_order_and_number(self) -> None:
        values = np.array([[[1.0, -5.0, 2.0, 3.0, np.nan, 4.0]]])
        owner = np.array([2, 0, 2, 0, 1, 0])
        assert oddest_of_each(values, owner, 4)[:, 0, 0].tolist()[0] == -5.0
        assert oddest_of_each(values, owner, 4)[2, 0, 0] == 2.0
        assert np.isnan(oddest_of_each(values, owner, 4)[[1, 3], 0, 0]).all()

    def test_what_was_not_observed_stays_unknown(self) -> None:
        story = job()
        story.node["node_memory_used_ratio"][:, 3] = np.nan
        values = look(story.window(), self.VIEW, NOW_S).values
        assert np.isnan(values[3, 3]).all()
        assert np.isfinite(values[3, :3]).all()

    def test_a_few_missing_rows_change_little(self) -> None:
        whole, holed = job(), job()
        holed.node["node_memory_used_ratio"][-4:-2, 3] = np.nan
        before = look(whole.window(), self.VIEW, NOW_S).values[3, 3, 0]
        assert look(holed.window(), self.VIEW, NOW_S).values[3, 3, 0] == pytest.approx(before, abs=1.0)

    def test_a_metric_that_nobody_sends_is_unknown_throughout(self) -> None:
        view = View(metrics=(*METRICS, Metric("node_iowait_ratio", False, 0.01, "ratio")), span_s=10.0, past_s=15.0)
        story = job()
        del story.node["node_iowait_ratio"]
        assert np.isnan(look(story.window(), view, NOW_S).values[:, 4]).all()
