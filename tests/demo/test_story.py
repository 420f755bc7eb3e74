"""What the demo demands of a restart, and how long it waits on a busy machine."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest

from eagle_eye.demo import stack as stack_module
from eagle_eye.demo.narration import _last_sound, _last_step
from eagle_eye.demo.stack import PACE_S, Stack, StageFailed


class LoggedStack(Stack):
    """A stack of which only the job's step log exists."""

    def __init__(self, step_log: Path) -> None:
        self.step_log = step_log
        self._waiting = lambda _what: nullcontext()
        self._processes = {}

    def log(self, step_s: float, *losses: float) -> None:
        lines = [
            {"time_s": number * step_s, "step": number, "attempt": 1, "loss": loss}
            for number, loss in enumerate(losses, start=1)
        ]
        self.step_log.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def stack(tmp_path: Path) -> LoggedStack:
    return LoggedStack(tmp_path / "steps.jsonl")


class FakeTime:
    """A clock on which sleeping costs no time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    made = FakeTime()
    monkeypatch.setattr(stack_module, "time", made)
    return made


def waited_s(stack: LoggedStack, clock: FakeTime, within_s: float = 10.0) -> float:
    with pytest.raises(StageFailed, match="an action is asked for: not within"):
        stack.wait("an action is asked for", lambda: None, within_s)
    return clock.now_s


def test_a_wait_ends_in_time_where_steps_are_short(stack: LoggedStack, clock: FakeTime) -> None:
    stack.log(PACE_S / 2, *[2.0] * 20)
    assert waited_s(stack, clock) == pytest.approx(10.0, abs=0.2)


def test_a_wait_is_longer_in_proportion_where_steps_are_long(stack: LoggedStack, clock: FakeTime) -> None:
    stack.log(3 * PACE_S, *[2.0] * 20)
    assert waited_s(stack, clock) == pytest.approx(30.0, abs=0.2)


def test_before_the_first_steps_a_wait_has_its_own_length(stack: LoggedStack, clock: FakeTime) -> None:
    assert waited_s(stack, clock) == pytest.approx(10.0, abs=0.2)


def test_a_wait_in_vain_says_how_slow_steps_were(stack: LoggedStack, clock: FakeTime) -> None:
    stack.log(1.2, *[2.0] * 20)
    with pytest.raises(StageFailed, match=r"not within 24 s, in which the job's newest steps took 1\.2 s each"):
        stack.wait("a step", lambda: None, 10.0)


def test_a_step_whose_successors_loss_is_broken_is_not_sound(stack: LoggedStack) -> None:
    stack.log(0.3, 3.0, 2.9, 2.8, math.nan, math.nan)
    assert (_last_sound(stack, 1), _last_step(stack, 1)) == (2, 5)
