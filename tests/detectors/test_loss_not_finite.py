"""A loss that is no number any more, and overflows that are daily life."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.loss_not_finite import LossNotFinite
from eagle_eye.detectors.types import Blind, Verdict
from tests.detectors.windows import Story

DETECTOR = LossNotFinite()


def detect(story: Story) -> list[Verdict]:
    return DETECTOR.detect(story.window())


def test_a_loss_that_breaks_everywhere_at_once_accuses_nobody() -> None:
    story = Story()
    story.device["train_loss"][-5:, :] = np.inf
    (verdict,) = detect(story)
    assert (verdict.fault, verdict.node, verdict.fact) == ("loss_not_finite", None, True)
    assert verdict.onset_s == 1_000.0 - 5


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


def test_steps_that_are_all_skipped_are_told_of() -> None:
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


def test_the_loss_of_a_few_ranks_is_only_told_of() -> None:
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


def test_is_blind_where_nobody_reports_a_loss() -> None:
    story = Story()
    for name in ("train_loss", "train_grad_norm", "train_local_grad_norm"):
        del story.device[name]
    with pytest.raises(Blind, match="loss"):
        detect(story)
