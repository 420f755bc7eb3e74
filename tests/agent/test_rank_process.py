from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.collectors.training import MESSAGES_PER_SECOND_MAX, RankProcess, means
from eagle_eye.agent.training_hook.message import HookEvent, HookMessage, Totals
from tests.agent.fakes import message


def met(first: HookMessage) -> RankProcess:
    process = RankProcess(first, pid=7, device=0, now_s=0.0)
    process.accept(first, 0.0, 1000.0)
    return process


def steps(number: int, count: float, **changes: float) -> HookMessage:
    totals = Totals(steps=count, timed_steps=count, step_s=0.5 * count)
    return message(number, step=int(count), totals=totals._replace(**changes))


def test_a_row_holds_the_means_since_the_last_row() -> None:
    process = met(message())
    process.accept(steps(2, 4, losses=4.0, loss=8.0, token_step_s=2.0, timed_tokens=400.0), 0.1, 1000.1)
    assert process.row(0.2) == {
        "train_step": 4.0,
        "train_step_seconds": 0.5,
        "train_loss": 2.0,
        "train_tokens_per_second": 200.0,
    }
    process.accept(steps(3, 5, losses=5.0, loss=11.0, token_step_s=2.5, timed_tokens=500.0), 1.1, 1001.1)
    assert process.row(1.2)["train_loss"] == 3.0


def test_while_no_step_ends_the_means_repeat() -> None:
    process = met(message())
    process.accept(steps(2, 4), 0.1, 1000.1)
    first = process.row(0.2)
    process.accept(steps(3, 4), 1.1, 1001.1)
    assert process.row(1.2) == first


def test_before_the_first_step_only_sequences_are_known() -> None:
    process = met(message(step=500, sequence=3, completed_sequence=-1))
    assert process.row(0.1) == {"nccl_sequence": 3.0, "nccl_completed_sequence": 0.0}


def test_a_process_met_late_is_not_averaged_over_its_past() -> None:
    process = met(steps(1, 1000, losses=1000.0, loss=9000.0))
    assert process.row(0.1) == {"train_step": 1000.0}
    process.accept(steps(2, 1001, losses=1001.0, loss=9001.0), 0.2, 1000.2)
    assert process.row(0.3)["train_loss"] == 1.0


def test_one_loss_that_was_not_finite_makes_the_mean_infinite_until_the_next_steps() -> None:
    process = met(message())
    process.accept(steps(2, 4, losses=3.0, loss=3.0, loss_odd=1.0), 0.1, 1000.1)
    assert process.row(0.2)["train_loss"] == math.inf
    process.accept(steps(3, 5, losses=4.0, loss=4.0, loss_odd=1.0), 0.3, 1000.3)
    assert process.row(0.4)["train_loss"] == 1.0


def test_a_silent_rank_loses_its_row_after_two_seconds() -> None:
    process = met(steps(1, 4, losses=1.0))
    assert process.rank(0.7).silent_s == 0.0
    assert process.rank(1.5).silent_s == 1.5
    assert process.row(1.5) != {}
    assert process.row(2.1) == {}


def test_after_its_goodbye_a_rank_is_not_silent_and_gives_its_last_steps_once() -> None:
    process = met(message())
    process.accept(steps(2, 4)._replace(goodbye=True), 0.1, 1000.1)
    assert process.rank(60.0).silent_s == 0.0
    assert process.row(60.0)["train_step"] == 4.0
    assert process.row(61.0) == {}


def test_an_event_sent_again_counts_once() -> None:
    process = met(message())
    events = (HookEvent(1, 1000.0, "phase", "start"), HookEvent(2, 1000.5, "checkpoint_begin", 7))
    new = process.accept(message(2, events=events, phase="start"), 0.1, 1000.6)
    assert [(event.kind, event.time_s, event.attributes) for event in new] == [
        ("phase", 1000.0, {"name": "start", "rank": 0, "job": "j", "attempt": 0}),
        ("checkpoint_begin", 1000.5, {"step": 7}),
    ]
    assert process.accept(message(3, events=events, phase="start"), 0.2, 1000.7) == []


def test_a_phase_whose_announcements_were_lost_is_known_from_the_state() -> None:
    process = met(message())
    new = process.accept(message(9, phase="eval"), 0.1, 1000.1)
    assert [(event.kind, event.attributes["name"]) for event in new] == [("phase", "eval")]
    assert process.accept(message(10, phase="eval"), 0.2, 1000.2) == []


def test_what_is_sent_beyond_the_limit_within_a_second_is_a_flood() -> None:
    process = met(message())
    assert not any(process.flooding(0.5) for _ in range(MESSAGES_PER_SECOND_MAX))
    assert process.flooding(0.6)
    assert not process.flooding(1.1)


amounts = st.floats(min_value=0.0, max_value=1e12)


@given(st.lists(st.builds(Totals, *[amounts] * len(Totals._fields)), min_size=2, max_size=2))
def test_means_of_any_totals_are_numbers(pair: list[Totals]) -> None:
    assert not any(math.isnan(value) for value in means(*pair).values())
