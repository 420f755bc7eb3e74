"""Senders whose clock is ahead, by what they send alone."""

from __future__ import annotations

import pytest

from eagle_eye.server.ingest.remote_write.endpoint import SENDERS_MAX, SenderClocks
from eagle_eye.server.ingest.remote_write.wire import Sample, WireSeries

T = 1_700_000_000.0


def sent(*times_s: float) -> list[WireSeries]:
    """Return series with one sample each."""
    return [WireSeries(b"%d" % at, "up", [Sample(round(time_s * 1000), 1.0)]) for at, time_s in enumerate(times_s)]


def scrapes(clocks: SenderClocks, ahead_s: list[float], interval_s: float = 15.0) -> list[float]:
    """Send a scrape of three series every interval, two seconds after it; return how wrong each is placed."""
    wrong_s = []
    for at, ahead in enumerate(ahead_s):
        taken_s = T + interval_s * at
        offset_s = clocks.offset_s("token", sent(*[taken_s + ahead] * 3), taken_s + 2.0)
        wrong_s.append(ahead + offset_s)
    return wrong_s


@pytest.mark.parametrize("ahead_s", [10.0, 60.0, 300.0, 21_600.0, 2e9])
def test_a_sender_that_is_ahead_is_put_right_from_its_first_request_on(ahead_s: float) -> None:
    assert max(map(abs, scrapes(SenderClocks(), [ahead_s] * 20))) <= 2.1


@pytest.mark.parametrize("ahead_s", [60.0, 300.0, 21_600.0])
def test_one_that_is_set_is_put_right_at_once(ahead_s: float) -> None:
    assert max(map(abs, scrapes(SenderClocks(), [0.0] * 5 + [ahead_s] * 20 + [0.0] * 20))) <= 2.1


def test_one_that_is_set_back_by_little_is_put_right_within_two_minutes() -> None:
    wrong_s = scrapes(SenderClocks(), [20.0] * 5 + [0.0] * 12)
    assert max(map(abs, wrong_s[-4:])) == 0.0


@pytest.mark.parametrize("behind_s", [-600.0, -30.0, 0.0, 1.0])
def test_nothing_is_added_to_the_times_of_one_that_is_late(behind_s: float) -> None:
    clocks = SenderClocks()
    assert [clocks.offset_s("token", sent(T + at + behind_s), T + at) for at in range(100)] == [0.0] * 100


def test_a_few_series_with_times_of_their_own_do_not_speak_for_their_sender() -> None:
    assert SenderClocks().offset_s("token", sent(T, T, T, T + 1e9, T + 1e9), T + 1.0) == 0.0


def test_senders_are_told_apart_and_bounded() -> None:
    clocks = SenderClocks()
    assert clocks.offset_s("one", sent(T + 60), T) == -60.0
    assert clocks.offset_s("two", sent(T), T) == 0.0
    for number in range(2 * SENDERS_MAX):
        clocks.offset_s(f"{number}", sent(T + 60), T)
    assert len(clocks._senders) == SENDERS_MAX
    assert clocks.offset_s("nothing", [], T) == 0.0
