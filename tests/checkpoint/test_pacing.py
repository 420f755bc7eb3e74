"""How much of a copy goes now: properties that hold for every link and every span."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.checkpoint.traffic import (
    BURST_S,
    MARGIN_RATIO,
    PIECE_BYTES_MIN,
    PIECE_S,
    Cap,
    Cost,
    LinkState,
    next_piece,
)

lefts = st.integers(1, 1 << 40)
rates = st.floats(1e6, 2e10)
delays = st.floats(0.0, 0.002)


def measured(rate: float, delay_s: float) -> Cost:
    """What is known after pieces of several lengths over a link."""
    cost = Cost()
    for number in range(60):
        count = max(1, cost.bytes_within(PIECE_S) >> number % 3)
        cost.measured(count, delay_s + count / rate)
    return cost


@given(lefts, rates, delays, st.floats(0.0, 10.0), st.floats(0.0, 1.0))
def test_a_piece_ends_within_the_margin_of_its_span(
    left: int, rate: float, delay_s: float, length_s: float, passed: float
) -> None:
    cost, now_s = measured(rate, delay_s), 100.0 + passed * length_s
    count, _ = next_piece(now_s, LinkState(False, 100.0, 100.0 + length_s), left, cost, Cap(None))
    if count:
        assert now_s + cost.seconds(count) <= 100.0 + MARGIN_RATIO * length_s + 1e-6


@given(lefts, rates)
def test_nothing_goes_while_others_send(left: int, rate: float) -> None:
    count, wait_s = next_piece(1.0, LinkState(True, 0.0, None), left, measured(rate, 0.0), Cap(None))
    assert count == 0
    assert wait_s > 0


@given(lefts, rates, delays, st.one_of(st.none(), st.just(LinkState(False, 0.0, None))))
def test_where_no_end_is_known_something_always_goes(
    left: int, rate: float, delay_s: float, sight: LinkState | None
) -> None:
    count, _ = next_piece(5.0, sight, left, measured(rate, delay_s), Cap(None))
    assert 0 < count <= left


@given(lefts, rates, st.floats(0.05, 10.0))
def test_a_span_that_has_room_for_the_least_piece_is_used(left: int, rate: float, length_s: float) -> None:
    cost = measured(rate, 0.0)
    count, _ = next_piece(0.0, LinkState(False, 0.0, length_s), left, cost, Cap(None))
    assert bool(count) == (cost.bytes_within(min(PIECE_S, MARGIN_RATIO * length_s)) >= min(left, PIECE_BYTES_MIN))


def test_who_waits_for_the_next_span_asks_again_when_this_one_should_have_ended() -> None:
    count, wait_s = next_piece(0.9, LinkState(False, 0.0, 1.0), 1 << 30, measured(1e8, 0.0), Cap(None))
    assert count == 0
    assert wait_s == pytest.approx(0.1)


@given(rates, st.lists(st.floats(0.0, 0.1), min_size=1, max_size=60))
def test_no_more_goes_than_the_cap_allows(rate: float, waits_s: list[float]) -> None:
    cap, cost, now_s, sent = Cap(rate), measured(1e9, 0.0), 7.0, 0
    for wait_s in waits_s:
        count, _ = next_piece(now_s, None, 1 << 40, cost, cap)
        cap.spend(count)
        sent += count
        assert sent <= rate * (now_s - 7.0) + max(PIECE_BYTES_MIN, rate * BURST_S) + 1
        now_s += wait_s


@given(rates, lefts)
def test_under_a_cap_something_goes_after_the_wait_that_was_said(rate: float, left: int) -> None:
    cap, cost, now_s = Cap(rate), measured(1e9, 0.0), 0.0
    for _ in range(50):
        count, wait_s = next_piece(now_s, None, left, cost, cap)
        cap.spend(count)
        if not count:
            assert wait_s > 0
            assert next_piece(now_s + wait_s * 1.001 + 1e-6, None, left, cost, cap)[0] > 0
            return
        now_s += 1e-6


@given(rates, delays)
def test_delay_and_rate_of_a_link_are_learned_from_its_pieces(rate: float, delay_s: float) -> None:
    cost = measured(rate, delay_s)
    count = max(1, cost.bytes_within(PIECE_S))
    assert cost.seconds(count) == pytest.approx(delay_s + count / rate, rel=0.3)


def test_a_link_that_has_become_slower_is_known_after_some_pieces() -> None:
    cost = measured(1e9, 0.0)
    for number in range(50):
        count = cost.bytes_within(PIECE_S) >> number % 3
        cost.measured(count, 0.0002 + count / 1e8)
    assert cost.bytes_per_s == pytest.approx(1e8, rel=0.1)


def test_the_first_pieces_are_small_and_grow() -> None:
    cost = Cost()
    first = cost.bytes_within(PIECE_S)
    assert first <= 1 << 20
    cost.measured(first, first / 1e10)
    assert first < cost.bytes_within(PIECE_S) <= 2 * first
