from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from eagle_eye.agent.nvml.connection import GuardedCalls
from tests.agent.fakes import until

STALL_S = 0.02


@pytest.fixture
def calls(request: pytest.FixtureRequest) -> Iterator[GuardedCalls[int]]:
    made: GuardedCalls[int] = GuardedCalls(request.node.name, STALL_S)
    yield made
    made.close()


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Callable[[], int]:
    """How many threads the test's calls have."""
    return lambda: sum(thread.name == request.node.name for thread in threading.enumerate())


def answering(value: int) -> Callable[[], int]:
    return lambda: value


class Hanging:
    """A call that does not return until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.made = 0

    def __call__(self) -> int:
        self.made += 1
        assert self.let_go.wait(30.0)
        return -1


def test_calls_that_answer_share_one_thread(calls: GuardedCalls[int], threads: Callable[[], int]) -> None:
    for _ in range(20):
        assert calls.run({key: answering(key) for key in range(8)}, 5.0) == {key: key for key in range(8)}
    assert threads() == 1
    assert calls.busy() == set()


def test_what_a_call_raises_is_its_answer_and_no_other_call_s(calls: GuardedCalls[int]) -> None:
    answers = calls.run({0: lambda: 1 // 0, 1: answering(1)}, 5.0)
    assert isinstance(answers[0], ZeroDivisionError)
    assert answers[1] == 1


def test_a_call_that_hangs_costs_its_own_answer_alone(calls: GuardedCalls[int]) -> None:
    hanging = Hanging()
    assert calls.run({0: answering(0), 1: hanging, 2: answering(2)}, 0.5) == {0: 0, 2: 2}
    assert calls.busy() == {1}
    hanging.let_go.set()


def test_a_key_whose_call_has_not_returned_is_not_called_again(calls: GuardedCalls[int]) -> None:
    hanging = Hanging()
    for _ in range(3):
        assert calls.run({0: answering(0), 1: hanging}, 0.1) == {0: 0}
    assert hanging.made == 1
    hanging.let_go.set()
    until(lambda: not calls.busy())
    assert calls.run({1: answering(7)}, 5.0) == {1: 7}


def test_an_answer_that_comes_too_late_is_not_taken_for_a_later_one(calls: GuardedCalls[int]) -> None:
    hanging = Hanging()
    assert calls.run({1: hanging}, 0.05) == {}
    hanging.let_go.set()
    until(lambda: not calls.busy())
    assert calls.run({2: answering(2)}, 5.0) == {2: 2}


def test_threads_are_as_many_as_calls_that_hang_and_one(calls: GuardedCalls[int], threads: Callable[[], int]) -> None:
    hanging = {key: Hanging() for key in range(5)}
    everything: dict[int, Callable[[], int]] = {**hanging, 9: answering(9)}
    for _ in range(10):
        assert calls.run(everything, 1.0) == {9: 9}
    assert threads() <= 6
    for call in hanging.values():
        call.let_go.set()
    until(lambda: not calls.busy())
    assert calls.run({9: answering(9)}, 5.0) == {9: 9}
    assert threads() <= 6


def test_closing_ends_the_threads_and_waits_for_none_that_hangs(
    calls: GuardedCalls[int], threads: Callable[[], int]
) -> None:
    hanging = Hanging()
    calls.run({0: answering(0), 1: hanging}, 0.1)
    calls.close()
    hanging.let_go.set()
    until(lambda: threads() == 0)
