"""What is learned of a job's idle spans, told in steps on a clock of its own."""

from __future__ import annotations

import pytest

from eagle_eye.checkpoint.traffic import STEPS_KEPT, IdleSpans

Step = list[tuple[float, float]]  # the bursts of a step, and at last (its length, its length)


def tell(spans: IdleSpans, steps: list[Step]) -> float:
    """Tell of whole steps, one after another; return when the last one has ended."""
    now_s = 0.0
    spans.mark(now_s)
    for step in steps:
        for began_s, ended_s in step[:-1]:
            spans.busy(now_s + began_s)
            spans.idle(now_s + ended_s)
        now_s += step[-1][1]
        spans.mark(now_s)
    return now_s


def steps_of(*lengths_s: float) -> list[Step]:
    """Steps that are idle for 60%, busy for 30%, idle for the rest."""
    return [[(0.6 * length, 0.9 * length), (length, length)] for length in lengths_s]


def left_s(spans: IdleSpans, now_s: float) -> float:
    sight = spans.sight(now_s)
    assert not sight.busy
    assert sight.ends_s is not None
    return sight.ends_s - now_s


def test_a_span_of_a_steady_step_ends_where_it_always_has() -> None:
    spans = IdleSpans()
    now_s = tell(spans, steps_of(*[1.0] * 5))
    assert left_s(spans, now_s) == pytest.approx(0.6)
    assert left_s(spans, now_s + 0.5) == pytest.approx(0.1)


def test_nothing_is_known_before_three_steps() -> None:
    spans = IdleSpans()
    now_s = tell(spans, steps_of(1.0, 1.0))
    assert spans.sight(now_s).ends_s is None


def test_a_link_of_which_nothing_was_told_is_not_busy_and_for_how_long_is_not_known() -> None:
    sight = IdleSpans().sight(5.0)
    assert (sight.busy, sight.ends_s) == (False, None)


def test_the_last_span_of_a_step_goes_on_in_the_first_of_the_next() -> None:
    spans = IdleSpans()
    now_s = tell(spans, steps_of(*[1.0] * 5))
    spans.busy(now_s + 0.6)
    assert spans.sight(now_s + 0.7).busy
    spans.idle(now_s + 0.9)
    assert left_s(spans, now_s + 0.9) == pytest.approx(0.1 + 0.6)


def test_traffic_that_crosses_the_end_of_a_step_belongs_to_the_step_before() -> None:
    spans = IdleSpans()
    now_s = 0.0
    spans.mark(now_s)
    for _ in range(5):
        spans.busy(now_s + 0.9)
        spans.mark(now_s + 1.0)
        spans.idle(now_s + 1.1)
        now_s += 1.0
    assert left_s(spans, now_s + 0.1) == pytest.approx(0.8)


def test_steps_that_grow_are_followed() -> None:
    spans = IdleSpans()
    lengths = [1.02**number for number in range(60)]
    now_s = tell(spans, steps_of(*lengths))
    assert 0.75 * 0.6 * lengths[-1] < left_s(spans, now_s) <= 0.6 * lengths[-1]


def test_steps_that_shrink_are_followed_within_the_margin() -> None:
    spans = IdleSpans()
    lengths = [0.98**number for number in range(60)]
    now_s = tell(spans, steps_of(*lengths))
    assert 0.85 * left_s(spans, now_s) < 0.6 * lengths[-1]


def test_steps_that_are_suddenly_half_as_long_are_known_after_a_few() -> None:
    spans = IdleSpans()
    now_s = tell(spans, steps_of(*[1.0] * 20, *[0.5] * 5))
    assert left_s(spans, now_s) == pytest.approx(0.3)


def test_what_was_is_forgotten() -> None:
    spans = IdleSpans()
    now_s = tell(spans, steps_of(*[0.5] * 20, *[1.0] * STEPS_KEPT))
    assert left_s(spans, now_s) == pytest.approx(0.6)


def test_steps_in_turn_are_taken_for_the_shorter_until_that_is_outlasted() -> None:
    spans = IdleSpans()
    now_s = tell(spans, steps_of(*[1.0, 2.0] * 8))
    assert left_s(spans, now_s) == pytest.approx(0.6)
    assert left_s(spans, now_s + 0.7) == pytest.approx(1.2 - 0.7)


@pytest.mark.parametrize("pause_s", [30.0, 3600.0])
def test_a_pause_for_an_evaluation_or_a_checkpoint_changes_nothing(pause_s: float) -> None:
    spans = IdleSpans()
    pause: Step = [(pause_s, pause_s + 0.3), (pause_s + 1, pause_s + 1)]
    now_s = tell(spans, [*steps_of(*[1.0] * 6), pause, *steps_of(1.0)])
    assert left_s(spans, now_s) == pytest.approx(0.6)
    assert spans.step_s == pytest.approx(1.0)


def test_in_a_pause_longer_than_any_step_nobody_knows_when_it_ends() -> None:
    spans = IdleSpans()
    now_s = tell(spans, steps_of(*[1.0] * 6))
    assert spans.sight(now_s + 5.0).ends_s is None


def test_each_span_of_a_step_has_its_own_length() -> None:
    spans = IdleSpans()
    tell(spans, [[(0.1, 0.2), (0.5, 0.6), (0.7, 0.7)]] * 5)
    assert spans.lengths_s == pytest.approx([0.1, 0.3, 0.1 + 0.1])
