"""The agent's own clock is set while it works: what it says is of one clock, that by which it is sent."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.clock import ClockBase, SystemClock
from eagle_eye.agent.transport.uplink import OLD_SERVER_S, RequestWriter
from eagle_eye.schema import rows
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Frame, decode_frame, decode_request, encode_frame
from tests.agent.fakes import FakeClock
from tests.agent.test_request_writer import frame as kept
from tests.agent.test_request_writer import parts
from tests.agent.test_request_writer import whole as encoded

NOW = 1_000_000.0
STEPS_S = [0.5, -0.5, 10.0, -10.0, 90.0, -90.0, 21_600.0, -21_600.0, 2e9]


def made(clock: FakeClock, base: ClockBase, sequence: int = 1, **more: Any) -> Frame:
    """Return a frame of now."""
    return decode_frame(encoded(sequence, time_s=clock.now_s(), clock_base_s=base.read(), **more))


def test_a_clock_that_nobody_sets_has_one_base_however_long_it_takes_to_read() -> None:
    base = ClockBase(SystemClock(), "boot")
    assert len({base.read() for _ in range(1_000)}) == 1


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_frame_that_waited_is_sent_with_the_time_of_the_clock_that_was_set_meanwhile(
    clock: FakeClock, step_s: float
) -> None:
    base = ClockBase(clock, "boot")
    xid = Event(clock.now_s() - 0.5, "xid", 0, {"code": 79})
    waited = made(clock, base, events=[xid])
    clock.advance(40.0)
    clock.jump(step_s)
    sent = base.dated(waited)
    assert sent.time_s == pytest.approx(clock.now_s() - 40.0)
    assert sent.events[0].time_s == pytest.approx(clock.now_s() - 40.5)
    assert sent.base_s == base.read() == pytest.approx(NOW + step_s)


@given(st.lists(st.tuples(st.floats(0.1, 1e4), st.floats(-1e5, 1e5)), min_size=1, max_size=10))
def test_however_often_the_clock_is_set_a_frame_is_as_old_as_it_is(story: list[tuple[float, float]]) -> None:
    clock = FakeClock(NOW)
    base = ClockBase(clock, "boot")
    waited = made(clock, base)
    for passed_s, step_s in story:
        clock.advance(passed_s)
        clock.jump(step_s)
        base.read()
    age_s = sum(passed_s for passed_s, _ in story)
    assert clock.now_s() - base.dated(waited).time_s == pytest.approx(age_s, abs=0.26)


def test_after_a_restart_of_the_agent_what_waits_is_still_dated_by_the_clock_of_now(clock: FakeClock) -> None:
    waited = made(clock, ClockBase(clock, "boot"))
    clock.advance(10.0)
    clock.jump(-300.0)
    assert ClockBase(clock, "boot").dated(waited).time_s == pytest.approx(clock.now_s() - 10.0)


@pytest.mark.parametrize("more", [{"boot_id": "another boot"}, {}])
def test_of_frames_of_another_boot_or_an_older_agent_the_times_stay(clock: FakeClock, more: dict[str, Any]) -> None:
    waited = decode_frame(encoded(1, time_s=NOW - 9_000.0, **({**more, "clock_base_s": 7.0} if more else {})))
    sent = ClockBase(clock, "boot").dated(waited)
    assert (sent.time_s, sent.base_s) == (NOW - 9_000.0, NOW)


@pytest.mark.parametrize("step_s", STEPS_S[2:])
def test_an_event_that_was_dated_before_the_step_is_told_as_the_clock_says_now(clock: FakeClock, step_s: float) -> None:
    base = ClockBase(clock, "boot")
    clock.advance(20.0)
    base.read()
    exit_ = Event(clock.now_s() + 0.3, "process_exit", 0, {"exit_code": 1})
    clock.advance(0.5)
    clock.jump(step_s)
    clock.advance(0.5)
    seen = Event(clock.now_s() - 0.2, "xid", 0, {"code": 79})
    reported = base.events([exit_, seen])
    assert [clock.now_s() - event.time_s for event in reported] == pytest.approx([0.7, 0.2], abs=1e-3)


def test_an_old_event_stays_old_when_the_clock_is_set(clock: FakeClock) -> None:
    base = ClockBase(clock, "boot")
    clock.jump(90.0)
    old = Event(clock.now_s() - 5 * 3600.0, "xid", 0, {"code": 79})
    assert base.events([old]) == [old]


def test_a_request_is_of_one_clock_as_rows_and_whole(clock: FakeClock) -> None:
    base = ClockBase(clock, "boot")
    writer = RequestWriter(clock.monotonic_s, base)
    waited = [kept(1, time_s=clock.now_s(), clock_base_s=base.read(), boot_id="boot")]
    waited += [encode_frame(made(clock, base, 2, blocks=[])), encode_frame(made(clock, base, 3))]
    clock.advance(5.0)
    clock.jump(3600.0)
    waited.append(kept(4, time_s=clock.now_s(), clock_base_s=base.read()))
    request = parts(writer.write(waited, clock.now_s()))
    template, unknown = rows.decode_template(request.templates[0])
    frames = [decode_frame(row) if not rows.is_row(row) else rows.read_row(template, row).frame for row in request.rows]
    assert (len(request.templates), unknown) == (1, ())
    writer.answered(415, "content_type")
    whole = [decode_frame(raw) for raw in decode_request(writer.write(waited, clock.now_s()).body)[1]]
    for sent in (frames, whole):
        assert [clock.now_s() - one.time_s for one in sent] == pytest.approx([5.0, 5.0, 5.0, 0.0])
        assert {one.base_s for one in sent} == {base.read()}
    clock.advance(OLD_SERVER_S)


def test_while_the_clock_is_left_alone_a_frame_is_sent_as_the_bytes_that_were_kept(clock: FakeClock) -> None:
    base = ClockBase(clock, "boot")
    raw = encode_frame(made(clock, base, blocks=[]))
    assert parts(RequestWriter(clock.monotonic_s, base).write([raw], NOW)).rows == [raw]
