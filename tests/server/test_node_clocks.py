"""Clocks of nodes that are set while they speak: each time is placed by the clock that told it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Frame
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import corrected
from tests.server.builders import NOW, FakeClock, Running, body, frame, running

STEPS_S = [10.0, 30.0, 60.0, 90.0, 300.0, 6 * 3600.0, 73 * 365 * 86_400.0]
BOTH_WAYS = [*STEPS_S, *(-step_s for step_s in STEPS_S[:-1])]


def told(
    fleet: Fleet, at_s: float, ahead_s: float, sequence: int, base_s: float | None = None, delay_s: float = 0.01
) -> float:
    """Send one live frame by a clock so far ahead; return where the server places it, by how much too late."""
    time_s = at_s + ahead_s
    offset_s = fleet.offset_s("n1", time_s, at_s + delay_s, time_s, base_s)
    fleet.heard(frame(sequence, time_s=time_s), at_s + delay_s)
    return time_s + offset_s - at_s


def run(fleet: Fleet, ahead_s: list[float], interval_s: float = 1.0, base: bool = False) -> list[float]:
    """Send a frame every interval by a clock that is so far ahead at each of them; return how wrong each is placed."""
    return [
        told(fleet, NOW + interval_s * at, ahead, at + 1, NOW - 1_000 + ahead if base else None)
        for at, ahead in enumerate(ahead_s)
    ]


@pytest.mark.parametrize("base", [True, False])
@pytest.mark.parametrize(
    ("step_s", "interval_s"), [(one, 1.0) for one in BOTH_WAYS] + [(one, 10.0) for one in STEPS_S[1:]]
)
def test_a_clock_that_was_wrong_at_boot_and_is_set_right_is_believed_with_the_next_frame(
    step_s: float, interval_s: float, base: bool
) -> None:
    wrong_s = run(Fleet(10), [step_s] * 10 + [0.0] * 30, interval_s, base)
    assert max(map(abs, wrong_s)) <= 2.1


@pytest.mark.parametrize("base", [True, False])
@pytest.mark.parametrize("step_s", BOTH_WAYS)
def test_a_clock_that_was_right_and_goes_wrong_and_back_is_believed_with_the_next_frame(
    step_s: float, base: bool
) -> None:
    wrong_s = run(Fleet(10), [0.0] * 70 + [step_s] * 10 + [0.0] * 70, base=base)
    assert max(map(abs, wrong_s)) <= 2.1


@pytest.mark.parametrize("step_s", [-2.5, -5.0, -9.0])
def test_a_clock_set_back_by_less_than_an_interval_is_believed_after_three_frames(step_s: float) -> None:
    wrong_s = run(Fleet(10), [0.0] * 20 + [step_s] * 10, 10.0)
    assert max(map(abs, wrong_s[:20])) <= 0.1
    assert max(map(abs, wrong_s[20:22])) <= abs(step_s) + 0.1
    assert max(map(abs, wrong_s[22:])) <= 0.1


def test_a_clock_set_back_by_less_than_an_interval_is_believed_at_once_where_the_agent_says_so() -> None:
    assert max(map(abs, run(Fleet(10), [0.0] * 20 + [-9.0] * 10, 10.0, base=True))) <= 0.1


@given(
    st.lists(st.tuples(st.floats(-1e5, 1e5), st.integers(1, 100)), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([1.0, 2.0, 5.0]),
)
def test_whatever_a_clock_does_no_frame_is_placed_further_off_than_an_interval(
    story: list[tuple[float, int]], base: bool, interval_s: float
) -> None:
    ahead_s = [ahead for ahead, frames in story for _ in range(frames)]
    wrong_s = run(Fleet(10), ahead_s, interval_s, base)
    assert max(map(abs, wrong_s)) <= 2.1 + (0.0 if base else interval_s)


@given(st.lists(st.floats(0.0, 1.9), min_size=1, max_size=200))
def test_no_delay_of_the_network_is_taken_for_a_clock_that_was_set(delays_s: list[float]) -> None:
    fleet = Fleet(10)
    for at, delay_s in enumerate(delays_s):
        told(fleet, NOW + at, 0.0, at + 1, delay_s=delay_s)
    assert sum(fleet.clock_notes.steps.values()) == 0


def test_a_server_that_stood_still_for_half_a_minute_takes_no_clock_for_set() -> None:
    fleet = Fleet(10)
    for at in range(60):
        told(fleet, NOW + at, 0.0, at + 1)
    for at in range(60, 90, 5):  # what waited for the server, all read in one moment
        offset_s = fleet.offset_s("n1", NOW + at, NOW + 90, NOW + at)
        assert offset_s == 0.0
    assert sum(fleet.clock_notes.steps.values()) == 0


def test_requests_that_are_slow_for_good_are_believed_and_the_first_quick_one_again() -> None:
    fleet = Fleet(10)
    told(fleet, NOW, 0.0, 1)
    assert [fleet.offset_s("n1", NOW + at, NOW + at + 5.0) for at in (1, 2, 3)] == [0.0, 0.0, 5.0]
    assert fleet.offset_s("n1", NOW + 9, NOW + 9) == 0.0


@pytest.mark.parametrize("base_s", [None, NOW])
def test_a_server_that_starts_under_load_calls_no_clock_set(base_s: float | None) -> None:
    fleet = Fleet(10)
    for at, delay_s in enumerate([7.0, 6.5, 7.2, 0.1, 0.1]):
        offset_s = fleet.offset_s("n1", NOW + at, NOW + at + delay_s, None, base_s)
    assert offset_s == 0.0
    assert sum(fleet.clock_notes.steps.values()) == 0


def test_a_clock_that_says_it_was_not_set_is_not_called_set() -> None:
    fleet = Fleet(10)
    for at in range(10):
        fleet.offset_s("n1", NOW + at, NOW + at + (60.0 if at > 4 else 0.0), None, NOW)
    assert sum(fleet.clock_notes.steps.values()) == 0


def test_frames_that_waited_do_not_move_the_estimate_up() -> None:
    fleet = Fleet(10)
    told(fleet, NOW, 0.0, 1)
    for at in range(1, 20):
        assert fleet.offset_s("n1", NOW + at, NOW + at + 8.0, NOW - 600) == 0.0


def test_rows_of_a_node_are_offset_as_its_frames_are() -> None:
    one, many = Fleet(10), Fleet(10)
    for at, ahead_s in enumerate([30.0] * 5 + [0.0] * 5 + [-30.0] * 5):
        now_s = NOW + at
        sent_s, base_s = now_s + ahead_s, NOW + ahead_s
        expected = one.offset_s("n1", sent_s, now_s, None, base_s)
        assert many.offsets_s(["n1"], [sent_s], [now_s], [base_s]) == [expected]
    assert one.clock_notes.steps == many.clock_notes.steps == {"agent": 2, "server": 0}


@given(
    st.lists(st.floats(0.0, 2e10), min_size=1, max_size=20),
    st.sampled_from([0.0, 60.0, -60.0, 6 * 3600.0]),
)
def test_no_time_is_placed_after_its_receipt_nor_before_a_decade_ago(times_s: list[float], ahead_s: float) -> None:
    fleet = Fleet(10)
    offset_s = fleet.offset_s("n1", NOW + ahead_s, NOW)
    moved_s = fleet.moved_s("n1", times_s, NOW) or [0.0] * len(times_s)
    placed_s = [time_s + offset_s + by_s for time_s, by_s in zip(times_s, moved_s, strict=True)]
    assert max(placed_s) <= NOW + 5.0 + 1e-3
    assert min(placed_s) >= NOW - 2e10 if any(moved_s) else NOW - 10 * 366 * 86_400.0
    assert fleet.clock_notes.moved["frame"] == sum(by_s != 0.0 for by_s in moved_s)


def test_times_that_cannot_be_keep_their_distance_to_each_other() -> None:
    fleet = Fleet(10)
    fleet.offset_s("n1", NOW, NOW)
    moved_s = fleet.moved_s("n1", [NOW + 100, NOW + 101, NOW - 1], NOW)
    assert moved_s == pytest.approx([-101.0, -101.0, 0.0])
    assert fleet.moved_s("n1", [NOW + 4, NOW + 5, NOW + 6], NOW) == pytest.approx([-6.0] * 3)
    assert fleet.moved_s("n1", [NOW + 3, NOW + 4, NOW + 5], NOW) is None


def test_frames_of_before_the_clock_was_set_back_are_placed_by_the_clock_that_it_was() -> None:
    fleet = Fleet(10)
    for at in range(5):
        told(fleet, NOW + at, 3600.0, at + 1)
    # Three frames waited, then the clock was set right, and a frame was made and sent by it.
    times_s = [NOW + 3605, NOW + 3606, NOW + 3607, NOW + 8]
    offset_s = fleet.offset_s("n1", NOW + 8, NOW + 8, max(times_s))
    moved_s = fleet.moved_s("n1", times_s, NOW + 8) or ()
    placed_s = [time_s + offset_s + by_s - NOW for time_s, by_s in zip(times_s, moved_s, strict=True)]
    assert placed_s == pytest.approx([5, 6, 7, 8], abs=0.1)


@pytest.mark.parametrize(
    ("time_s", "expected_s"), [(NOW + 6, NOW), (NOW + 1e9, NOW), (12.0, NOW), (NOW + 1, NOW + 1), (NOW - 86_400,) * 2]
)
def test_an_event_of_a_time_that_cannot_be_is_of_its_frames_time(time_s: float, expected_s: float) -> None:
    placed = corrected(frame(time_s=NOW, events=[Event(time_s, "xid", 0, {"code": 79})]), 0.0, NOW)
    assert placed.events[0].time_s == expected_s


@pytest.mark.parametrize("ahead_s", [-90.0, -6 * 3600.0, 90.0, 6 * 3600.0])
def test_an_event_that_the_clock_dated_before_it_was_set_is_of_its_moment(ahead_s: float) -> None:
    fleet = Fleet(10)
    for at in range(20):
        told(fleet, NOW + at, ahead_s, at + 1)
    xid = Event(NOW + 19.5 + ahead_s, "xid", 0, {"code": 79})
    one = frame(21, time_s=NOW + 20, events=[xid])
    offset_s = fleet.offset_s("n1", NOW + 20, NOW + 20, one.time_s)
    assert fleet.dated(one, offset_s, NOW + 20).events[0].time_s == pytest.approx(NOW + 19.5, abs=0.6)
    assert fleet.clock_notes.moved["event"] == 1


def test_an_old_event_that_is_told_just_after_the_clock_was_set_stays_old() -> None:
    fleet = Fleet(10)
    for at in range(5):
        told(fleet, NOW + at, -90.0, at + 1)
    one = frame(6, time_s=NOW + 5, events=[Event(NOW - 5 * 3600, "xid", 0, {"code": 79})])
    offset_s = fleet.offset_s("n1", NOW + 5, NOW + 5, one.time_s)
    assert fleet.dated(one, offset_s, NOW + 5).events[0].time_s == NOW - 5 * 3600


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path, FakeClock()) as started:
        yield started


def shown(server: Running) -> list[Frame]:
    return [seen for seen, _, _ in server.watcher.frames]


def test_a_time_from_the_future_is_taken_moved_counted_and_named(server: Running) -> None:
    assert server.send(body(frame(time_s=NOW + 3600))).json()["accepted"] == 1
    assert [seen.time_s for seen in shown(server)] == [NOW]
    assert server.metric("ingest_moved_times_total", of="frame") == 1
    said = server.client.get("/api/v1/nodes/n1").json()["agent"]["troubles"]["clock"]
    assert said == "1 times that it sent cannot be and were moved to when they came"


@pytest.mark.parametrize("time_s", [4_070_908_800.0, 5e9, 1e-3, 86_400.0])
def test_whatever_the_clock_says_a_query_finds_the_frame_at_its_receipt(server: Running, time_s: float) -> None:
    server.send(body(frame(1, time_s=time_s)))
    server.send(body(frame(2, time_s=time_s + 1), sent_s=time_s + 1))
    kept = server.dispatcher.services.history.query(["n1"], NOW - 5, NOW + 5)
    assert [(one.frame.sequence, one.frame.time_s + one.offset_s) for one in kept] == [(1, NOW), (2, NOW)]


def test_a_clock_that_was_set_is_counted_and_named(server: Running) -> None:
    server.send(body(frame(1, time_s=NOW + 60, clock_base_s=60.0), sent_s=NOW + 60))
    server.send(body(frame(2, clock_base_s=0.0)))
    assert [seen.time_s for seen in shown(server)] == [NOW, NOW]
    assert server.metric("agent_clock_steps_total", seen_by="agent") == 1
    said = server.client.get("/api/v1/nodes/n1").json()["agent"]["troubles"]["clock"]
    assert said == "its clock was set by -60.0 s (the agent says so)"


def test_after_a_restart_an_event_of_the_future_is_still_of_its_frames_time(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.send(body(frame(1, events=[Event(NOW + 900, "xid", 0, {"code": 79})])))
        assert shown(server)[0].events[0].time_s == NOW
    with running(tmp_path) as server:
        assert server.watcher.recovered[0][0].events[0].time_s == NOW


@pytest.mark.parametrize("base_s", [None, 60.0])
def test_what_waited_for_the_server_to_start_keeps_its_times(tmp_path: Path, base_s: float | None) -> None:
    base: dict[str, Any] = {} if base_s is None else {"clock_base_s": base_s}
    clock = FakeClock()
    with running(tmp_path, clock) as server:
        server.send(body(frame(1, **base)))
    clock.advance(30)
    with running(tmp_path, clock) as server:
        server.send(body(frame(2, time_s=NOW + 20, **base), sent_s=NOW + 21))
        assert [seen.time_s for seen in shown(server)] == [NOW + 20]


def test_a_node_that_started_meanwhile_is_dated_by_its_new_clock(tmp_path: Path) -> None:
    clock = FakeClock()
    with running(tmp_path, clock) as server:
        server.send(body(frame(1, clock_base_s=60.0)))
    clock.advance(30)
    with running(tmp_path, clock) as server:
        server.send(body(frame(2, time_s=NOW - 3600, clock_base_s=-3600.0), sent_s=NOW - 3600))
        assert [seen.time_s for seen in shown(server)] == [NOW + 30]


def test_an_offset_outlives_the_server(tmp_path: Path) -> None:
    clock = FakeClock()
    with running(tmp_path, clock) as server:
        server.send(body(frame(1, time_s=NOW - 60, clock_base_s=60.0), sent_s=NOW - 60))
    clock.advance(30)
    with running(tmp_path, clock) as server:
        server.send(body(frame(2, time_s=NOW - 40, clock_base_s=60.0), sent_s=NOW - 39))
        assert [seen.time_s for seen in shown(server)] == [NOW + 20]
