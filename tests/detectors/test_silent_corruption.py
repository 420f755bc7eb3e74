"""A node that computes wrong numbers, and data, shards and overflows that only look so."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.numbers.silent_corruption import SilentCorruption
from eagle_eye.detectors.types import Blind, Verdict
from tests.detectors.windows import Story

DETECTOR = SilentCorruption()


def job(nodes: int = 8, gpus: int = 1, rows: int = 60, spread: float = 0.2) -> Story:
    """Return a job of one step a row whose local gradient norms vary as they do."""
    story = Story(nodes=nodes, gpus=gpus, rows=rows)
    shape = story.device["train_step"].shape
    story.device["train_step"] = np.repeat(np.arange(1.0, rows + 1)[:, None], shape[1], axis=1)
    story.device["train_step_seconds"] = np.full(shape, 1.0)
    story.device["train_local_grad_norm"] = 1.5 * np.exp(spread * np.random.default_rng(4).normal(size=shape))
    return story


def replicated(story: Story, shards: int = 2) -> Story:
    """Rank i holds shard i modulo ``shards``; its checksum is another in each step, and equal to its replicas'."""
    rows, count = story.device["train_step"].shape
    each = np.random.default_rng(5).normal(size=(rows, shards))
    story.device["train_parameter_checksum"] = each[:, np.arange(count) % shards].copy()
    return story


def detect(story: Story) -> list[Verdict]:
    return DETECTOR.detect(story.window())


def accused(story: Story) -> str | None:
    (verdict,) = detect(story)
    assert verdict.fault == "silent_data_corruption"
    return verdict.node


class TestNotFinite:
    def test_names_the_node_whose_gradient_broke_before_the_reduction(self) -> None:
        story = Story()
        story.device["train_local_grad_norm"][-5, 2] = np.inf
        story.device["train_local_grad_norm"][-4:, :] = np.nan
        story.device["train_loss"][-4:, :] = np.inf
        assert accused(story) == "n2"
        assert detect(story)[0].fact

    def test_onset_precedes_the_end_of_the_step_that_broke(self) -> None:
        story = job(rows=62)
        story.device["train_step"] = np.floor(story.device["train_step"] / 10)  # the last two end with rows -13 and -3
        story.device["train_step_seconds"][:] = 10.0
        story.device["train_local_grad_norm"][-13:-3, 2] = np.inf
        story.device["train_loss"][-3:, :] = np.inf
        assert detect(story)[0].onset_s < 1_000.0 - 12

    def test_names_it_also_when_everything_broke_within_one_row(self) -> None:
        story = Story()
        story.device["train_local_grad_norm"][-5, 2] = np.inf
        story.device["train_loss"][-5:, :] = np.inf
        assert accused(story) == "n2"

    def test_names_the_first_where_all_gradients_break_a_step_later(self) -> None:
        story = job()
        story.device["train_local_grad_norm"][-5, 2] = np.inf
        story.device["train_local_grad_norm"][-4:, :] = np.inf
        story.device["train_loss"][-4:, :] = np.inf
        assert accused(story) == "n2"

    def test_two_nodes_at_once_accuse_nobody(self) -> None:
        story = job()
        story.device["train_local_grad_norm"][-5, 2:4] = np.inf
        story.device["train_loss"][-4:, :] = np.inf
        assert detect(story) == []

    def test_a_gradient_that_overflows_while_the_loss_goes_on_is_daily_life_in_float16(self) -> None:
        story = job()
        story.device["train_local_grad_norm"][-4, 2] = np.inf
        story.device["train_grad_norm"][-4, :] = np.inf
        assert detect(story) == []


class TestNorms:
    def test_names_the_rank_whose_gradient_is_wrong_again_and_again(self) -> None:
        story = job()
        story.device["train_local_grad_norm"][[-7, -4, -1], 5] *= 30
        (verdict,) = detect(story)
        assert verdict.node == "n5"
        assert verdict.confidence >= 0.9
        assert len(verdict.kinds) >= 2
        assert abs(verdict.onset_s - (1_000.0 - 7)) <= 1.0

    @pytest.mark.parametrize("lines", [[-1], [-1, -2]])
    def test_twice_is_not_again_and_again(self, lines: list[int]) -> None:
        story = job()
        story.device["train_local_grad_norm"][lines, 5] *= 30
        assert detect(story) == []

    def test_a_data_spike_is_the_same_on_all_ranks(self) -> None:
        story = job()
        story.device["train_local_grad_norm"][-5:, :] *= 30
        assert detect(story) == []

    def test_unlike_shards_differ_from_the_first_step_on(self) -> None:
        story = job()
        story.device["train_local_grad_norm"][:, 5] *= 10
        assert detect(story) == []

    def test_heavy_tails_of_packed_sequences_accuse_nobody(self) -> None:
        for seed in range(10):
            story = job(nodes=16, spread=0.0)
            noise = np.random.default_rng(seed).standard_t(3, size=(60, 16))
            story.device["train_local_grad_norm"] = 1.5 * np.exp(0.3 * noise)
            assert detect(story) == []

    def test_several_nodes_at_once_are_no_nodes_fault(self) -> None:
        story = job()
        story.device["train_local_grad_norm"][-4:, 4:6] *= 30
        assert detect(story) == []

    def test_a_rank_with_other_data_is_only_reported(self) -> None:
        story = job()
        story.device["train_local_grad_norm"][-5:, 5] *= 30
        story.device["train_loss"][-5:, 5] *= 3
        (verdict,) = detect(story)
        assert verdict.confidence < 0.9
        assert "data" in verdict.summary

    def test_another_role_is_no_peer(self) -> None:
        story = job()
        story.device["train_local_grad_norm"][-5:, 6:] *= 30
        story.role_of = np.array([0, 0, 0, 0, 0, 0, 1, 1])
        assert detect(story) == []

    def test_a_young_attempt_has_no_course_to_leave(self) -> None:
        story = job(rows=11)
        story.device["train_local_grad_norm"][-5:, 5] *= 30
        assert detect(story) == []


class TestChecksums:
    def test_names_the_replica_that_differs_step_after_step(self) -> None:
        story = replicated(job())
        story.device["train_parameter_checksum"][-4:, 3] += 1.0
        (verdict,) = detect(story)
        assert (verdict.node, verdict.fact) == ("n3", True)

    def test_checksums_that_are_reported_every_few_steps_serve(self) -> None:
        story = replicated(job())
        story.device["train_parameter_checksum"][-12:, 3] += 1.0
        story.device["train_parameter_checksum"][np.arange(60) % 4 > 0] = np.nan
        assert accused(story) == "n3"

    def test_twice_may_be_a_sum_in_another_order(self) -> None:
        story = replicated(job())
        story.device["train_parameter_checksum"][-2:, 3] += 1.0
        assert detect(story) == []

    def test_another_rank_each_time_is_no_nodes_fault(self) -> None:
        story = replicated(job())
        for line in range(1, 6):
            story.device["train_parameter_checksum"][-line, line] += 1.0
        assert detect(story) == []

    def test_checksums_of_shards_cannot_be_compared(self) -> None:
        story = replicated(job(nodes=16), shards=16)
        assert detect(story) == []

    def test_a_shard_of_its_own_from_the_first_step_on_is_by_design(self) -> None:
        story = replicated(job())
        story.device["train_parameter_checksum"][:, 3] += 1.0
        assert detect(story) == []

    def test_of_two_replicas_nobody_knows_which_is_wrong(self) -> None:
        story = replicated(job(), shards=4)
        story.device["train_parameter_checksum"][-5:, 2] += 1.0
        (verdict,) = detect(story)
        assert verdict.node is None
        assert verdict.nodes == ("n2", "n6")

    def test_of_two_replicas_nobody_is_accused_however_long_they_differ(self) -> None:
        story = replicated(job(), shards=4)
        for seed in range(20):
            walk = np.random.default_rng(seed).normal(size=(60, 4)).cumsum(axis=0)
            story.device["train_parameter_checksum"] = np.hstack([walk, walk])
            story.device["train_parameter_checksum"][-25:, 2] += 1.0
            assert accused(story) is None

    def test_steps_shorter_than_a_row_cannot_be_compared(self) -> None:
        story = replicated(Story(nodes=8))
        story.device["train_parameter_checksum"][-5:, 3] += 1.0
        assert detect(story) == []


def test_is_blind_without_local_norms_and_checksums() -> None:
    story = Story()
    del story.device["train_local_grad_norm"]
    with pytest.raises(Blind, match="checksum"):
        detect(story)
