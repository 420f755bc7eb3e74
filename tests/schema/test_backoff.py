"""How long everything of ours waits before it tries again."""

from __future__ import annotations

from eagle_eye.schema.backoff import Backoff, doubled_s


def test_waits_double_up_to_the_most() -> None:
    assert [doubled_s(0.5, 3.0, failures) for failures in (1, 2, 3, 4, 5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_any_number_of_failures_is_a_wait() -> None:
    assert doubled_s(0.5, 3.0, 10**6) == 3.0


def test_chance_shortens_a_wait_by_up_to_half() -> None:
    drawn = iter((0.0, 1.0, 0.5))
    backoff = Backoff(1.0, 60.0, lambda: next(drawn))
    assert [backoff.next_s() for _ in range(3)] == [0.5, 2.0, 3.0]


def test_after_a_success_the_next_failure_is_the_first() -> None:
    backoff = Backoff(1.0, 60.0, lambda: 1.0)
    assert [backoff.next_s(), backoff.next_s()] == [1.0, 2.0]
    backoff.reset()
    assert backoff.next_s() == 1.0


def test_clients_are_spread_by_default() -> None:
    assert len({Backoff(1.0, 60.0).next_s() for _ in range(20)}) > 10
