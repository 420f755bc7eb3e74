"""A node that has gone leaves its minutes behind: they are found by its name as long as they are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.server.history.embedded_history import EmbeddedHistory
from tests.server.builders import FakeClock
from tests.server.segments.kept import opened, retain, told
from tests.server.segments.test_levels import HOUR_S, START_S, add, power, sample

DAY_S = 86_400.0
RAW_S = 2 * DAY_S


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START_S + HOUR_S)


@pytest.fixture
def history(tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedHistory]:
    """A history in which n1 was heard on the first day only and nothing but minutes is left of it."""
    monkeypatch.setattr("eagle_eye.server.history.journal.NODES_PER_SHARD", 1)
    with opened(tmp_path, clock, retention_s=RAW_S, minutes_retention_s=10 * DAY_S) as opened_:
        add(opened_, sample(1, START_S + 61, value=100.0))
        for day in range(4):
            time_s = START_S + day * DAY_S + 61
            add(opened_, sample(day + 1, time_s, "n2", value=200.0), received_s=clock.now_s())
            clock.advance(DAY_S)
        pass_by(opened_)
        yield opened_


def pass_by(history: EmbeddedHistory) -> None:
    """Have everything looked at that may be too old, until nothing goes any more."""
    clock = history.compaction._clock
    assert isinstance(clock, FakeClock)
    for _ in range(3):
        retain(history)
        history.segment_store.retain(clock.now_s())
        clock.advance(300)


def known(history: EmbeddedHistory) -> list[str]:
    return [node for (node,) in history.journal.reader.read("SELECT node FROM nodes ORDER BY node", ())]


def test_minutes_of_a_node_that_has_gone_are_found_by_its_name(history: EmbeddedHistory) -> None:
    assert {one.node for one in history.streams()} == {"n2"}
    assert told(history, ["n1"]) == []
    assert power(history, 60.0) == {START_S + 60: 100.0}
    assert power(history, HOUR_S) == {START_S: 100.0}


def test_a_node_that_comes_back_has_its_past_and_its_present(history: EmbeddedHistory, clock: FakeClock) -> None:
    add(history, sample(1, clock.now_s() - HOUR_S, "n3"))
    add(history, sample(2, START_S + 4 * DAY_S + 61, value=300.0))
    assert power(history, 60.0, end_s=START_S + 6 * DAY_S) == {
        START_S + 60: 100.0,
        START_S + 4 * DAY_S + 60: 300.0,
    }


def test_a_node_of_which_nothing_is_left_is_forgotten(history: EmbeddedHistory, clock: FakeClock) -> None:
    assert known(history) == ["n1", "n2"]
    clock.advance(800 * DAY_S)
    pass_by(history)
    assert known(history) == []
