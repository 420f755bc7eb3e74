"""A loss that is no number any more, and overflows that are daily life."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.numbers.loss_not_finite import LossNotFinite
from eagle_eye.detectors.types import Blind, Floats, Verdict
from tests.detectors.courses import learning
from tests.detectors.windows import Story

DETECTOR = LossNotFinite()


def detect(story: Story) -> list[Verdict]:
    return DETECTOR.detect(story.window())


def test_a_loss_that_breaks_everywhere_at_once_accuses_nobody() -> None:
    story = Story()
    story.device["train_loss"][-5:, :] = np.inf
    (verdict,) = detect(story)
    assert (verdict.fault, verdict.node, verdict.fact) == ("loss_not_finite", None, True)


STEP_ROWS = 12


def with_long_steps(rows: int) -> Story:
    """Return a job of steps of ``STEP_ROWS`` rows, whose newest one ended ``rows`` rows ago with a broken loss."""
    story = Story()
    length, ranks = story.device["train_step"].shape
    number = (np.arange(length) - (length - rows)) // STEP_ROWS + 10
    story.device["train_step"] = np.repeat(number[:, None].astype(float), ranks, axis=1)
    story.device["train_step_seconds"][:] = STEP_ROWS
    story.device["train_loss"][-rows:] = np.inf
    return story


def test_onset_precedes_the_end_of_the_last_step_before() -> None:
    rows = 3
    (verdict,) = detect(with_long_steps(rows))
    ended_s = 1_000.0 - (rows - 1) - STEP_ROWS  # its gradients spoiled the parameters; some row may come late
    assert ended_s - 3.0 <= verdict.onset_s <= ended_s - 1.0


def test_onset_is_less_than_three_rows_before_where_steps_are_short() -> None:
    story = Story()
    story.device["train_loss"][-5:, :] = np.inf
    assert detect(story)[0].onset_s == 1_000.0 - 4 - 2.5


def test_is_told_within_two_rows() -> None:
    story = Story()
    story.device["train_loss"][-2:, :] = np.inf
    assert detect(story)


def test_says_who_was_first() -> None:
    story = Story()
    story.device["train_local_grad_norm"][-5, 2] = np.inf
    story.device["train_loss"][-4:, :] = np.inf
    assert "n2" in detect(story)[0].summary


def test_waits_for_the_rows_of_all_ranks() -> None:
    story = Story()
    story.device["train_loss"][-1, 0] = np.inf
    assert detect(story) == []


def without_rows_of_a_rank(rows: int) -> Story:
    """Return a job whose loss broke ``rows`` rows ago; a rank's rows have not come since."""
    story = Story()
    story.device["train_loss"][-rows:, :] = np.inf
    for values in story.device.values():
        values[-rows:, 3] = np.nan
    return story


def test_waits_for_a_rank_whose_rows_are_late() -> None:
    assert detect(without_rows_of_a_rank(8)) == []


def test_waits_no_longer_than_ten_seconds_for_rows() -> None:
    assert detect(without_rows_of_a_rank(12))


def test_a_loss_that_is_a_number_again_is_over() -> None:
    story = Story()
    story.device["train_loss"][-3, :] = np.inf
    assert detect(story) == []


def test_one_step_skipped_for_an_overflow_is_daily_life_in_float16() -> None:
    story = Story()
    story.device["train_grad_norm"][-2:, :] = np.inf
    assert detect(story) == []


def test_a_search_for_the_loss_scale_at_the_start_is_no_fault() -> None:
    story = Story(rows=10)
    story.device["train_grad_norm"][:, :] = np.inf
    assert detect(story) == []


def test_steps_that_are_all_skipped_are_reported() -> None:
    story = Story()
    story.device["train_grad_norm"][-20:, :] = np.inf
    (verdict,) = detect(story)
    assert "skipped" in verdict.summary
    assert not verdict.fact
    assert verdict.confidence < 0.9


def test_gradient_norms_alone_restart_a_job_that_reports_no_loss() -> None:
    story = Story()
    del story.device["train_loss"]
    story.device["train_grad_norm"][-20:, :] = np.inf
    assert detect(story)[0].confidence >= 0.9


def test_the_loss_of_a_few_ranks_is_only_reported() -> None:
    story = Story()
    story.device["train_loss"][-10:, 1] = np.inf
    (verdict,) = detect(story)
    assert not verdict.fact
    assert verdict.confidence < 0.9


def test_only_ranks_that_report_a_loss_count() -> None:
    story = Story()
    story.device["train_loss"][:, :3] = np.nan  # only the last pipeline stage has one
    story.device["train_loss"][-5:, 3] = np.inf
    assert detect(story)[0].fact


def falling_to_zero(rows: int, norm: float = 1.0, before: Floats | None = None) -> Story:
    """One step a row; in the last ``rows`` of them the loss is exactly zero."""
    story = Story()
    length = len(story.times_s)
    course = learning(length, start=300) if before is None else before
    story.device["train_step"] /= 2
    story.device["train_loss"][:] = np.asarray(course)[:, None]
    story.device["train_loss"][length - rows :] = 0.0
    story.device["train_grad_norm"][length - rows :] = norm
    return story


def test_a_loss_that_falls_to_exactly_zero_is_reported_after_two_steps() -> None:
    assert detect(falling_to_zero(1)) == []
    (verdict,) = detect(falling_to_zero(2))
    assert (verdict.fault, verdict.node, verdict.asks) == ("loss_not_finite", None, "notify")
    assert verdict.onset_s == 1_000.0 - 2 - 1.5  # the row of the last usual loss, and what rows may be late


def test_with_a_gradient_norm_that_is_not_finite_it_restarts_the_job() -> None:
    (verdict,) = detect(falling_to_zero(2, norm=np.inf))
    assert verdict.kinds == {"loss", "gradient_norm"}
    assert verdict.asks is None
    assert verdict.confidence >= 0.9


LEARNT = {
    "bit_by_bit": 2.0 * np.exp(-0.3 * np.arange(60.0)),
    "to_less_than_is_printed": np.round(1e-4 * np.random.default_rng(0).uniform(1, 6, 60), 4),
    "zero_now_and_then": np.where(np.arange(60) % 9 == 0, 0.0, learning(60)),
    "around_zero": 0.1 * np.random.default_rng(0).normal(size=60),
    "one_value_repeated": np.full(60, 1.7),
    "nothing_before": np.zeros(60),
}


@pytest.mark.parametrize("norm", [1.0, np.inf])
@pytest.mark.parametrize("name", LEARNT)
def test_a_loss_that_has_come_down_to_zero_is_no_fault(name: str, norm: float) -> None:
    assert detect(falling_to_zero(3, norm, LEARNT[name])) == []


def test_one_zero_repeated_until_the_loss_is_next_reported_is_one_zero() -> None:
    said_now_and_then = learning(60)[np.arange(60) // 10 * 10]
    assert detect(falling_to_zero(10, before=said_now_and_then)) == []
    assert detect(falling_to_zero(11, before=said_now_and_then))


def test_ranks_that_have_always_said_zero_say_nothing() -> None:
    story = falling_to_zero(0)
    story.device["train_loss"][:, :3] = 0.0  # only the last pipeline stage has a loss
    assert detect(story) == []


def test_the_zero_of_one_rank_is_its_batch() -> None:
    story = falling_to_zero(0)
    story.device["train_loss"][-5:, 1] = 0.0
    assert detect(story) == []


def test_is_blind_where_nobody_reports_a_loss() -> None:
    story = Story()
    for name in ("train_loss", "train_grad_norm", "train_local_grad_norm"):
        del story.device[name]
    with pytest.raises(Blind, match="loss"):
        detect(story)
