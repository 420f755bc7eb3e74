"""Working something out once for a window gives what working it out each time does."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest

from eagle_eye.detectors.signs.once import once, once_for_members
from eagle_eye.detectors.types import Blind, Window
from tests.detectors.windows import NOW_S, Story

calls: list[object] = []


@once
def age_s(window: Window, since_s: float) -> float:
    calls.append(since_s)
    if since_s > window.now_s:
        raise Blind(f"{since_s} is still to come")
    return window.now_s - since_s


@once_for_members
def names(window: Window) -> str:
    calls.append(window.nodes)
    return " ".join(window.nodes)


@pytest.fixture(autouse=True)
def nothing_called() -> None:
    calls.clear()


def test_is_worked_out_once_for_each_question() -> None:
    window = Story().window()
    assert [age_s(window, NOW_S - 1), age_s(window, NOW_S - 1), age_s(window, NOW_S - 2)] == [1.0, 1.0, 2.0]
    assert calls == [NOW_S - 1, NOW_S - 2]


def test_another_window_is_another_question() -> None:
    window = Story().window()
    later = dataclasses.replace(window, now_s=NOW_S + 5)
    assert (age_s(window, NOW_S), age_s(later, NOW_S)) == (0.0, 5.0)


def test_who_asks_again_hears_the_same_reason() -> None:
    window = Story().window()
    for _ in range(2):
        with pytest.raises(Blind, match="still to come"):
            age_s(window, NOW_S + 9)
    assert calls == [NOW_S + 9]


def test_a_reason_keeps_no_window_alive() -> None:
    window = Story().window()
    with pytest.raises(Blind):
        age_s(window, NOW_S + 9)
    seen = weakref.ref(window.times_s.base if window.times_s.base is not None else window.times_s)
    gc.disable()
    try:
        del window
        assert seen() is None
    finally:
        gc.enable()


def test_windows_of_the_same_members_share_what_depends_on_them_alone() -> None:
    window = Story().window()
    shared = dataclasses.replace(window, now_s=NOW_S + 5)
    assert names(window) == names(shared)
    assert names(Story(nodes=2).window()) == "n0 n1"
    assert len(calls) == 2
