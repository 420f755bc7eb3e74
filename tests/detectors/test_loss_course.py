"""A loss that leaves its course: what is a spike, what has diverged, and the daily life that is neither."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.detectors.numbers.loss_course import LossCourse
from eagle_eye.detectors.types import Blind, Curve, Floats
from tests.detectors.courses import LENGTH, curve, first_said, learning, norms, window
from tests.detectors.windows import NOW_S, Story

DETECTOR = LossCourse()
AT = 300  # line from which on something is wrong


def spoilt(values: Floats, factor: float | Floats, steps: int | None = None) -> Floats:
    values = values.copy()
    values[AT : None if steps is None else AT + steps] *= factor
    return values


def said(course: Curve, **changes: object) -> list[tuple[str, float]]:
    return [(v.fault, v.confidence) for v in DETECTOR.detect(window(course, **changes))]


def sure(course: Curve, since: int = AT) -> int | None:
    """Return after how many steps a restart would be asked for."""
    for reports in range(1, len(course.number) - since + 1):
        end = since + reports
        seen = Curve(course.number[:end], course.times_s[:end], {m: v[:end] for m, v in course.values.items()})
        found = DETECTOR.detect(window(seen))
        if any(v.fault == "loss_divergence" and v.confidence >= 0.9 and v.asks is None for v in found):
            return reports
    return None


def reported(course: Curve, since: int = AT) -> tuple[int, str | None] | None:
    """Return after how many steps a divergence is reported, and what it asks for instead of a restart."""
    for reports in range(1, len(course.number) - since + 1):
        end = since + reports
        seen = Curve(course.number[:end], course.times_s[:end], {m: v[:end] for m, v in course.values.items()})
        for verdict in DETECTOR.detect(window(seen)):
            if verdict.fault == "loss_divergence":
                return reports, verdict.asks
    return None


def noisy(values: Floats, noise: float, seed: int = 3) -> Floats:
    return np.asarray(values * np.exp(noise * np.random.default_rng(seed).normal(size=len(values))))


@pytest.mark.parametrize(("factor", "steps"), [(1.5, 5), (2.0, 3), (4.0, 10)])
def test_a_spike_is_told_within_three_steps(factor: float, steps: int) -> None:
    found = first_said(DETECTOR, curve(train_loss=spoilt(learning(), factor, steps)), AT)
    assert found is not None
    assert found[0] <= 3
    assert found[1].fault == "loss_spike"
    assert abs(found[1].onset_s - (NOW_S - (LENGTH - AT))) <= 1.0


def test_a_spike_of_the_gradient_norm_alone_is_told() -> None:
    course = curve(train_loss=learning(), train_grad_norm=spoilt(norms(), 10.0, 5))
    found = first_said(DETECTOR, course, AT)
    assert found is not None
    assert found[0] <= 5
    assert "gradient norm" in found[1].summary


def test_a_spike_after_twenty_steps_is_told() -> None:
    loss = learning(40)
    loss[20:26] *= 2.0
    assert first_said(DETECTOR, curve(train_loss=loss), 20) is not None


def test_a_spike_is_over_when_the_loss_is_back() -> None:
    assert said(curve(train_loss=spoilt(learning(), 2.0, 10))) == []


def test_a_spike_that_recovers_slowly_never_restarts_the_job() -> None:
    fading = 1 + 1.5 * np.minimum(1, np.arange(LENGTH - AT) / 8) * np.exp(-np.arange(LENGTH - AT) / 40)
    assert sure(curve(train_loss=spoilt(learning(), fading), train_grad_norm=norms())) is None


def test_a_spike_of_twenty_steps_on_one_level_never_restarts_the_job() -> None:
    course = curve(train_loss=spoilt(learning(), 2.0, 20), train_grad_norm=spoilt(norms(), 4.0, 20))
    assert sure(course) is None


@pytest.mark.parametrize(("rate", "steps"), [(0.1, 25), (0.03, 30), (0.01, 100)])
def test_a_loss_that_rises_beyond_twice_its_level_has_diverged(rate: float, steps: int) -> None:
    rising = np.minimum(np.exp(rate * np.arange(LENGTH - AT)), 5.0)
    found = sure(curve(train_loss=spoilt(learning(), rising)))
    assert found is not None
    assert found <= steps


def test_a_loss_that_stays_up_with_its_gradient_norm_has_diverged() -> None:
    found = sure(curve(train_loss=spoilt(learning(), 1.6), train_grad_norm=spoilt(norms(), 6.0)))
    assert found is not None
    assert found <= 45


def test_the_onset_of_a_divergence_precedes_the_step_before() -> None:
    course = curve(train_loss=spoilt(learning(), 2.5), train_grad_norm=spoilt(norms(), 6.0))
    found = next(v for v in DETECTOR.detect(window(course)) if v.fault == "loss_divergence")
    assert found.onset_s < NOW_S - (LENGTH - AT) - 1.0


def test_a_loss_that_stays_far_up_with_its_gradient_norm_has_diverged_sooner() -> None:
    found = sure(curve(train_loss=spoilt(learning(), 2.5), train_grad_norm=spoilt(norms(), 6.0)))
    assert found is not None
    assert found <= 32


@pytest.mark.parametrize(("noise", "before"), [(0.005, 40), (0.02, 100), (0.05, 300)])
def test_a_slow_rise_is_reported_and_restarts_nothing(noise: float, before: int) -> None:
    rise = np.concatenate([np.linspace(7.5, 6.4, before), np.linspace(6.4, 10.2, 50), np.full(10, 10.2)])
    course = curve(train_loss=noisy(rise, noise))
    assert (found := reported(course, before)) is not None
    assert found[0] <= 50
    assert found[1] == "notify"
    assert sure(course, before) is None


@pytest.mark.parametrize(("noise", "before"), [(0.005, 100), (0.02, 100), (0.05, 300)])
def test_a_lasting_jump_by_a_third_is_reported_and_restarts_nothing(noise: float, before: int) -> None:
    jump = np.concatenate([np.linspace(2.5, 2.2, before), np.full(300, 3.0)])
    course = curve(train_loss=noisy(jump, noise))
    assert (found := reported(course, before)) is not None
    assert found[0] <= 70
    assert found[1] == "notify"
    assert sure(course, before) is None


def test_a_slow_rise_with_its_gradient_norm_has_diverged() -> None:
    rise = noisy(np.concatenate([np.linspace(7.5, 6.4, AT), np.linspace(6.4, 10.2, 50)]), 0.02)
    assert sure(curve(train_loss=rise, train_grad_norm=spoilt(norms(AT + 50), 6.0))) is not None


def test_a_loss_that_has_always_swung_as_far_is_quiet() -> None:
    swings = np.where(np.arange(600) // 60 % 3 == 2, 1.4, 1.0)
    assert reported(curve(train_loss=noisy(2.2 * swings, 0.1)), 400) is None


def test_a_loss_that_stays_a_half_up_on_one_level_may_be_other_data_and_restarts_nothing() -> None:
    assert sure(curve(train_loss=spoilt(learning(), 1.5), train_grad_norm=norms())) is None


def test_a_young_job_that_stays_lost_has_diverged() -> None:
    loss, norm = learning(60), norms(60)
    loss[20:] *= 2.5
    norm[20:] *= 6.0
    assert sure(curve(train_loss=loss, train_grad_norm=norm), 20) is not None


def test_divergence_is_seen_where_a_loss_is_negative() -> None:
    loss = -1.0 + 0.05 * np.random.default_rng(0).normal(size=LENGTH)
    loss[AT:] += np.minimum(0.1 * np.arange(LENGTH - AT), 5.0)
    assert sure(curve(train_loss=loss)) is not None


QUIET = {
    "one_noisy_step": curve(train_loss=spoilt(learning(), 3.0, 1), train_grad_norm=spoilt(norms(), 20.0, 1)),
    "a_curriculum_change_of_a_fifth": curve(train_loss=spoilt(learning(), 1.2), train_grad_norm=spoilt(norms(), 1.5)),
    "a_learning_rate_restart": curve(
        train_loss=spoilt(learning(), 1 + 0.12 * np.exp(-np.arange(LENGTH - AT) / 40)),
        train_grad_norm=spoilt(norms(), 2.0),
    ),
    "a_smaller_batch": curve(train_loss=np.concatenate([learning(AT), learning(LENGTH - AT, 0.06, 3, AT)])),
    "a_loss_noisy_by_a_tenth": curve(train_loss=learning(noise=0.1), train_grad_norm=norms(noise=0.5)),
    "a_late_plateau": curve(train_loss=np.full(LENGTH, 1.7)),
    "a_loss_logged_every_ten_steps": curve(
        train_loss=np.where(np.arange(LENGTH) % 10, np.nan, learning()), train_grad_norm=norms()
    ),
    "a_value_repeated_between_logs": curve(
        train_loss=learning()[np.arange(LENGTH) // 10 * 10],
        train_grad_norm=np.where(np.arange(LENGTH) // 10 == 31, 40.0, norms()[np.arange(LENGTH) // 10 * 10]),
    ),
    "an_evaluation_loss_among_the_others": curve(
        train_loss=np.where(np.arange(LENGTH) % 50 == 49, 1.4, 1.0) * learning()
    ),
    "early_training": curve(train_loss=learning(120, 0.05), train_grad_norm=norms(120) * 20 / (1 + np.arange(120))),
}


@pytest.mark.parametrize("name", QUIET)
def test_daily_life_is_quiet(name: str) -> None:
    assert first_said(DETECTOR, QUIET[name], 5 if len(QUIET[name].number) < AT else AT - 60) is None


def test_the_first_steps_after_a_restart_are_wild_by_nature() -> None:
    loss = learning(30, start=300)
    loss[:3] *= 2.0
    earlier = curve(train_loss=learning(350))
    assert first_said(DETECTOR, curve(first=300, train_loss=loss), 0, earlier=earlier) is None


def test_a_restart_from_an_older_checkpoint_is_quiet() -> None:
    again = 1.05 * learning(100, seed=5, start=250)
    earlier = curve(train_loss=learning(350))
    assert first_said(DETECTOR, curve(first=251, train_loss=again), 0, earlier=earlier) is None


def test_a_restart_that_is_worse_than_the_attempt_before_is_only_reported() -> None:
    again = 1.3 * learning(60, seed=5, start=100)
    earlier = curve(train_loss=np.concatenate([learning(101) * 1.3, learning(300, start=101)]))
    found = DETECTOR.detect(window(curve(first=102, train_loss=again), earlier=earlier))
    assert [(v.fault, v.asks) for v in found] == [("loss_divergence", "notify")]
    assert found[0].confidence < 0.9


def test_a_job_that_went_back_without_a_word_is_measured_anew() -> None:
    course = curve(train_loss=np.concatenate([learning(200), learning(100)]))
    course.number[200:] = np.arange(1.0, 101.0)
    assert first_said(DETECTOR, course, 200) is None


def test_a_loss_that_is_not_finite_is_left_to_others() -> None:
    loss = spoilt(learning(), 3.0)
    loss[-1] = np.inf
    assert said(curve(train_loss=loss)) == []


def test_is_blind_where_nobody_reports_a_loss() -> None:
    story = Story()
    for name in ("train_loss", "train_grad_norm"):
        del story.device[name]
    with pytest.raises(Blind, match="loss"):
        DETECTOR.detect(story.window())
