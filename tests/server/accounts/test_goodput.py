"""Where a job's time went: every second in one part, each part with its cause, what nobody can tell summed apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from eagle_eye.detectors.faults import FAULTS
from eagle_eye.server.accounts import goodput
from eagle_eye.server.accounts.goodput import NO_STEP, NOT_WATCHED, STANDSTILL, TimelineSpan, account, timeline
from eagle_eye.server.model.records import Attempt, Gap, Incident
from tests.server.accounts.past import attempt
from tests.server.builders import NOW, incident

HOUR = 3_600.0


def reported(fault: str = "hang", onset: float = 0, ended: float | None = None, **more: Any) -> Incident:
    """Return an incident that lasted from ``onset`` to ``ended``, both from NOW."""
    over = None if ended is None else NOW + ended
    fields: dict[str, Any] = {
        "fault": fault,
        "onset_s": NOW + onset,
        "detected_s": NOW + onset,
        "seen_s": over or NOW + onset,
        "ended_s": over,
        "state": "confirmed" if over is None else "recovered",
    }
    return incident(more.pop("id_", "inc_1"), **{**fields, **more})


def parts(attempts: Sequence[Attempt], incidents: Sequence[Incident] = (), now: float = HOUR) -> list[tuple[Any, ...]]:
    """Return each span's part, length and fault."""
    spans = timeline(attempts, incidents, NOW + now)
    return [(s.part, round(s.seconds, 6), s.cause.fault if s.cause else "") for s in spans]


def test_a_healthy_job_starts_up_trains_and_ends() -> None:
    one = attempt(0, 0, 1000, end="finished", first_step=1, first_step_s=100, last_step=50, last_step_s=980)
    assert parts([one]) == [("startup", 100, "start"), ("training", 880, ""), ("ending", 20, "finished")]


def test_what_a_fault_costs_is_all_that_follows_from_it() -> None:
    first = attempt(0, 0, 1000, end="failed", first_step=1, first_step_s=100, last_step=90, last_step_s=900)
    second = attempt(
        1,
        1060,
        3000,
        end="finished",
        first_step=81,
        first_step_s=1100,
        prior_step=90,
        caught_up_s=1200,
        last_step=300,
        last_step_s=3000,
    )
    assert parts([first, second], [reported("gpu_lost", 905, 1000)]) == [
        ("startup", 100, "start"),
        ("training", 800, ""),
        ("stopped", 100, "gpu_lost"),
        ("down", 60, "gpu_lost"),
        ("startup", 40, "gpu_lost"),
        ("redone", 100, "gpu_lost"),
        ("training", 1800, ""),
    ]


def test_the_documented_example_comes_out() -> None:
    """The figures of docs/explanation/accounts.md."""
    first = attempt(0, 0, 3600, end="failed", first_step=1, first_step_s=360, last_step=900, last_step_s=3240)
    second = attempt(
        1,
        3780,
        7200,
        end="finished",
        first_step=801,
        first_step_s=3960,
        prior_step=900,
        caught_up_s=4320,
        last_step=1700,
        last_step_s=7200,
    )
    slow = reported(
        "thermal_throttle", 4320, 5760, slowdown_ratio=0.25, attempt=1, family="slow:n2", node="n2", id_="inc_2"
    )
    sums = goodput.account(timeline([first, second], [reported("hang", 3240, 3600), slow], NOW + 7200))
    hours = {part: amount.seconds / HOUR for part, amount in sums.lost.items()}
    assert hours == pytest.approx({"startup": 0.15, "stopped": 0.1, "down": 0.05, "redone": 0.1, "slow": 0.08})
    assert sums.training.seconds / HOUR == pytest.approx(1.52)
    assert (sums.ettr_ratio, sums.goodput_ratio) == pytest.approx((0.80, 0.76))
    assert sums.lost["slow"].gpu_seconds / HOUR == pytest.approx(0.64)


def test_slowness_costs_its_share_and_only_the_worst_of_several_counts() -> None:
    one = attempt(0, 0, 1100, end="finished", first_step=1, first_step_s=0, last_step=50, last_step_s=1100)
    slow = reported("thermal_throttle", 0, 1000, slowdown_ratio=0.25, family="slow:n1")
    slower = reported("straggler", 500, 1000, slowdown_ratio=1.0, family="slow:n2", node="n2", id_="inc_2")
    lost = goodput.losses(timeline([one], [slow, slower], NOW + HOUR))
    assert [(loss.cause.fault, loss.cause.node) for loss in lost] == [("straggler", "n2"), ("thermal_throttle", "n1")]
    assert [loss.amount.seconds for loss in lost] == pytest.approx([250, 100])


def test_a_hang_that_ended_by_itself_is_lost_time_inside_the_training() -> None:
    one = attempt(0, 0, 1000, end="finished", first_step=1, first_step_s=100, last_step=50, last_step_s=1000)
    assert parts([one], [reported("hang", 300, 400)])[1:] == [
        ("training", 200, ""),
        ("stopped", 100, "hang"),
        ("training", 600, ""),
    ]


@pytest.mark.parametrize("family", ["stop", "stop:n2"])
def test_a_gpu_that_fails_beside_another_stops_the_job_as_the_first_does(family: str) -> None:
    one = attempt(0, 0, 1000, end="finished", first_step=1, first_step_s=100, last_step=50, last_step_s=1000)
    assert ("stopped", 100, "gpu_lost") in parts([one], [reported("gpu_lost", 300, 400, family=family)])


@pytest.mark.parametrize("state", ["false", "closed"])
def test_a_false_alarm_and_a_merged_incident_explain_nothing(state: str) -> None:
    one = attempt(0, 0, 1000, end="finished", first_step=1, first_step_s=100, last_step=50, last_step_s=1000)
    void = reported("hang", 300, 400, state=state, merged_into="inc_9" if state == "closed" else "")
    assert parts([one], [void])[1:] == [("training", 900, "")]


def test_without_any_step_nobody_can_tell() -> None:
    (span,) = timeline([attempt(0, 0, 1000, end="gone")], [], NOW + HOUR)
    assert (span.part, span.reason) == ("unknown", NO_STEP)


def test_an_incident_of_a_job_without_steps_explains_its_own_time_alone() -> None:
    found = parts([attempt(0, 0, 1000, end="gone")], [reported("hang", 900, 1000)])
    assert found == [("unknown", 900, ""), ("stopped", 100, "hang")]


def test_goodput_is_unknown_where_no_step_was_ever_seen() -> None:
    sums = account(timeline([attempt(0, 0, 1000, end="gone")], [reported("hang", 900, 1000)], NOW + HOUR))
    assert (sums.goodput_ratio, sums.ettr_ratio) == (None, None)
    assert sums.lost["stopped"].gpu_seconds == 800


def test_a_job_without_steps_lowers_no_other_jobs_goodput() -> None:
    mute = timeline([attempt(0, 0, 1000, end="gone")], [reported("hang", 0, 1000)], NOW + HOUR)
    one = attempt(0, 0, 1000, end="finished", first_step=1, first_step_s=0, last_step=50, last_step_s=1000)
    assert account([*mute, *timeline([one], [], NOW + HOUR)]).goodput_ratio == 1.0


def test_an_attempt_that_never_made_a_step_was_start_up_where_others_did() -> None:
    first = attempt(0, 0, 1000, end="failed", first_step=1, first_step_s=100, last_step=50, last_step_s=1000)
    second = attempt(1, 1000, 1500, end="failed")
    assert parts([first, second], [reported("process_crash", 990, 1000)])[-1] == ("startup", 500, "process_crash")


def test_time_that_nobody_watched_is_unknown_whatever_the_steps_say() -> None:
    one = attempt(0, 0, 1000, end="finished", first_step=1, first_step_s=0, last_step=50, last_step_s=1000)
    watched = timeline([replace(one, gaps=[Gap(NOW + 200, NOW + 500)])], [], NOW + HOUR)
    assert [(s.part, s.seconds, s.reason) for s in watched] == [
        ("training", 200, ""),
        ("unknown", 300, NOT_WATCHED),
        ("training", 500, ""),
    ]


def test_a_standstill_is_unknown_until_an_incident_or_a_step_explains_it() -> None:
    one = attempt(0, 0, first_step=1, first_step_s=0, last_step=50, last_step_s=1000, step_s=None, seen_s=2000)
    assert timeline([one], [], NOW + 1050)[-1].part == "training"  # the next step is under way
    found = timeline([one], [], NOW + 2000)[-1]
    assert (found.part, found.seconds, found.reason) == ("unknown", 1000, STANDSTILL)
    explained = timeline([one], [reported("hang", 1000)], NOW + 2000)[-1]
    assert (explained.part, explained.seconds) == ("stopped", 1000)


def test_the_pause_after_a_run_was_finished_is_nobodys_time() -> None:
    first = attempt(0, 0, 1000, end="finished", first_step=1, first_step_s=0, last_step=50, last_step_s=1000)
    second = attempt(0, 9000, 9100, id="att_9", run="att_9", end="finished", first_step=1, first_step_s=9000)
    spans = timeline([first, second], [], NOW + 2 * 9000)
    assert sum(span.seconds for span in spans) == 1100


def test_an_incident_of_another_run_of_the_same_number_explains_nothing() -> None:
    first = attempt(0, 0, 1000, end="finished", first_step=1, first_step_s=0, last_step=50, last_step_s=1000)
    spans = timeline([first], [reported("hang", 5000, 6000)], NOW + 9000)
    assert {span.part for span in spans} == {"training"}


def test_where_nobody_knows_how_many_gpus_the_time_is_counted_and_the_gpus_are_not() -> None:
    one = attempt(0, 0, 1000, end="finished", first_step=1, first_step_s=100, last_step=5, last_step_s=1000, gpus=None)
    lost = goodput.account(timeline([one], [], NOW + HOUR)).lost["startup"]
    assert (lost.seconds, lost.gpu_seconds, lost.uncounted_s) == (100, 0, 100)


def test_nothing_known_is_no_ratio() -> None:
    sums = goodput.account(timeline([attempt(0, 0, 1000, end="gone")], [], NOW + HOUR))
    assert (sums.ettr_ratio, sums.goodput_ratio) == (None, None)


moments = st.integers(-100, 5_000).map(float)
maybe = st.none() | moments


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Attempt], list[Incident]]:
    """Return attempts and incidents as they may stand on record, with times in any order inside them."""
    attempts = []
    start = draw(moments)
    for number in range(draw(st.integers(1, 4))):
        open_ = draw(st.booleans())
        end = start + draw(st.integers(0, 2_000))
        first = draw(maybe)
        attempts.append(
            attempt(
                number,
                start,
                None if open_ else end,
                end="" if open_ else draw(st.sampled_from(["finished", "failed", "superseded", "preempted", "gone"])),
                run=draw(st.sampled_from(["att_0", f"att_{number}"])),
                gpus=draw(st.none() | st.integers(1, 16)),
                first_step=None if first is None else 1.0,
                first_step_s=first,
                last_step=None if first is None else 9.0,
                last_step_s=None if first is None else draw(moments),
                caught_up_s=draw(maybe),
                prior_step=draw(st.none() | st.just(5.0)),
                seen_s=draw(moments),
                step_s=draw(st.none() | st.just(2.0)),
            )
        )
        away = draw(st.lists(st.tuples(moments, moments), max_size=3))
        attempts[-1] = replace(attempts[-1], gaps=[Gap(NOW + a, NOW + a + b) for a, b in away])
        start = end + draw(st.integers(0, 500))
    incidents = [
        reported(
            draw(st.sampled_from([fault.name for fault in FAULTS])),
            draw(moments),
            draw(maybe),
            attempt=draw(st.integers(0, 3)),
            slowdown_ratio=draw(st.floats(0, 5)),
            id_=f"inc_{number}",
        )
        for number in range(draw(st.integers(0, 5)))
    ]
    return attempts, incidents


@settings(max_examples=150)
@given(history=histories(), now=st.integers(0, 9_000), since=st.integers(-100, 9_000), length=st.integers(0, 5_000))
def test_the_parts_sum_to_the_whole(
    history: tuple[list[Attempt], list[Incident]], now: int, since: int, length: int
) -> None:
    attempts, incidents = history
    spans = timeline(attempts, incidents, NOW + now)
    assert all(span.seconds > 0 and 0 <= span.slow_ratio < 1 for span in spans)
    _without_overlap(spans, attempts, NOW + now)
    part = goodput.clipped(spans, NOW + since, NOW + since + length)
    sums = goodput.account(part)
    lost = sum(amount.seconds for amount in sums.lost.values())
    unknown = sum(amount.seconds for amount in sums.unknown.values())
    assert math.isclose(sums.training.seconds + lost + unknown, sums.wall.seconds, abs_tol=1e-6)
    for by in ("node", "fault"):
        grouped = goodput.grouped(goodput.losses(part), by)
        again = sum(amount.seconds for parts_ in grouped.values() for amount in parts_.values())
        assert math.isclose(again, lost, abs_tol=1e-6)
    gpu_seconds = sums.training.gpu_seconds + sum(a.gpu_seconds for a in (*sums.lost.values(), *sums.unknown.values()))
    assert math.isclose(gpu_seconds, sums.wall.gpu_seconds, abs_tol=1e-4)
    assert sums.ettr_ratio is None or 0 <= sums.ettr_ratio <= 1


def _without_overlap(spans: Sequence[TimelineSpan], attempts: Sequence[Attempt], now_s: float) -> None:
    """Check that each attempt's spans lie end to end and cover it."""
    for one in attempts:
        mine = sorted(s for s in spans if s.attempt_id == one.id and s.part != "down")
        end_s = max(one.started_s, now_s if one.ended_s is None else min(one.ended_s, now_s))
        assert math.isclose(sum(s.seconds for s in mine), end_s - one.started_s, abs_tol=1e-6)
        assert all(a.end_s <= b.start_s for a, b in pairwise(mine))
