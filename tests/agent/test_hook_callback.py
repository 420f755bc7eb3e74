from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_eye.agent.hook_callback import TrainingReport, never_raises, tokens_in
from tests.agent.fakes import Listener
from tests.agent.hearing import Hearing


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    hearing = Hearing(tmp_path / "hook.sock")
    yield hearing
    hearing.close()


def test_phases_do_not_nest_and_the_same_one_goes_on(listener: Listener) -> None:
    report = TrainingReport(socket=listener.path)
    report.begin(None, None, 0)
    for name in ("eval", "eval", "checkpoint"):
        report.enter(name)
    report.leave()
    report.end()
    events = {event.number: event for message in listener.read() for event in message.events}
    reported = [event.value for event in events.values() if event.kind == "phase"]
    assert reported == ["start", "eval", "start", "checkpoint", "start"]


def test_before_and_after_training_nothing_is_reported(listener: Listener) -> None:
    report = TrainingReport(socket=listener.path)
    report.enter("eval")
    report.leave()
    report.end(ValueError("x"))
    assert listener.read() == []


def test_an_error_that_is_reported_twice_is_one_event(listener: Listener) -> None:
    report = TrainingReport(socket=listener.path)
    report.begin(None, None, 0)
    training, error = report.training, ValueError("broken")
    assert training is not None
    training.error(error)
    report.end(error)
    events = {event.number: event.kind for message in listener.read() for event in message.events}
    assert list(events.values()).count("training_error") == 1


def test_an_interrupt_by_the_user_is_no_error(listener: Listener) -> None:
    report = TrainingReport(socket=listener.path)
    report.begin(None, None, 0)
    report.end(KeyboardInterrupt())
    assert {event.kind for message in listener.read() for event in message.events} == {"phase"}


def test_a_copy_reports_nothing_and_knows_where_to_report(listener: Listener) -> None:
    report = TrainingReport(socket=listener.path)
    report.begin(None, None, 0)
    report.enter("eval")
    copied = pickle.loads(pickle.dumps(report))
    assert (copied.training, copied.phase) == (None, "")
    copied.begin(None, None, 7)
    assert listener.read()[-1].step == 7
    copied.end()
    report.end()


def test_what_goes_wrong_in_a_callback_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Callback:
        def __init__(self) -> None:
            self.report = TrainingReport()

        @never_raises
        def on_step_end(self) -> None:
            raise KeyError("of ours")

    callback = Callback()
    callback.on_step_end()
    callback.on_step_end()
    assert callback.report.failures == 2
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"input_ids": SimpleNamespace(numel=lambda: 12)}, 12),
        ({"input_ids": [1, 2]}, None),
        ({"x": 1}, None),
        ([1, 2], None),
        (None, None),
    ],
)
def test_tokens_are_counted_where_a_batch_names_them(batch: Any, expected: int | None) -> None:
    assert tokens_in(batch) == expected
