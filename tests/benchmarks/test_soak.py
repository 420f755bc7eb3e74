"""The soak's own judgement: what grows, what is missing or twice, what a subscriber may get again."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.soak.growth import growth
from benchmarks.soak.plan import plan
from benchmarks.soak.received import Received
from benchmarks.soak.stored import Ranges, Stored

SECONDS = [float(second) for second in range(0, 1_800, 5)]


def saw(second: float) -> float:
    """What comes and goes with retention: up for a minute, then back."""
    return 5.0 * (second % 60.0) / 60.0


def test_what_only_comes_and_goes_is_flat() -> None:
    chance = random.Random(1)
    found = growth(SECONDS, [100.0 + saw(at) + chance.gauss(0.0, 1.0) for at in SECONDS])
    assert found.word == "flat"
    assert abs(found.ratio) < 0.01


def test_a_leak_below_the_sawtooth_is_found() -> None:
    chance = random.Random(2)
    found = growth(SECONDS, [100.0 + saw(at) + chance.gauss(0.0, 0.2) + 3.0 * at / 1_800.0 for at in SECONDS])
    assert found.word == "grows"
    assert found.ratio == pytest.approx(0.03, abs=0.005)


def test_what_shrinks_is_flat() -> None:
    assert growth(SECONDS, [200.0 - at / 100.0 for at in SECONDS]).word == "flat"


def test_what_is_all_noise_cannot_be_told() -> None:
    chance = random.Random(5)
    found = growth(SECONDS, [math.exp(chance.gauss(0.0, 2.0)) * (1.0 + at / 1_800.0) for at in SECONDS])
    assert found.ratio > 0.01
    assert found.low < 0.01
    assert found.word == "cannot tell"


def test_too_few_looks_tell_nothing() -> None:
    assert growth(SECONDS[:30], [1.0] * 30).word == "cannot tell"
    assert growth(SECONDS, [math.nan] * len(SECONDS)).word == "cannot tell"


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 12)), max_size=40), st.integers(0, 70))
def test_ranges_are_the_set_of_their_numbers(added: list[tuple[int, int]], last: int) -> None:
    ranges, numbers = Ranges(), set[int]()
    for first, more in added:
        new = set(range(first, first + more + 1))
        assert ranges.add(first, first + more) == len(new & numbers)
        numbers |= new
    assert ranges.missing(last) == len(set(range(1, last + 1)) - numbers)


def segment(stream: str, *sequences: int) -> pa.Table:
    return pa.table({"stream": [stream] * len(sequences), "sequence": list(sequences)})


def test_what_is_acknowledged_and_in_no_segment_is_missing(tmp_path: Path) -> None:
    stored = Stored(tmp_path)
    stored._take(segment("a", 1, 2, 4), merged=False)
    assert stored.missing({"a": 4}) == 1
    assert stored.missing({"a": 2, "b": 3}) == 3


def test_a_frame_in_two_segments_is_there_twice(tmp_path: Path) -> None:
    stored = Stored(tmp_path)
    stored._take(segment("a", 1, 2), merged=False)
    stored._take(segment("b", 2, 3), merged=False)
    assert stored.twice == 0
    stored._take(segment("a", 3, 2), merged=False)
    assert stored.twice == 1


def test_a_frame_twice_in_one_segment_is_there_twice_even_in_a_merged_one(tmp_path: Path) -> None:
    stored = Stored(tmp_path)
    stored._take(segment("a", 1, 2), merged=False)
    stored._take(segment("a", 1, 2), merged=True)
    assert stored.twice == 0
    stored._take(segment("a", 1, 2, 2), merged=True)
    assert stored.twice == 1


def event(id_: str, second: int = 0, incident: str = "inc_1") -> dict[str, Any]:
    data = {"incident_id": incident}
    return {"id": id_, "type": "t", "subject": incident, "time": f"2026-01-01T00:00:{second:02d}.000Z", "data": data}


def got(second: float, what: dict[str, Any]) -> dict[str, Any]:
    return {"time_s": second, "what": "got", "id": what["id"], "event": what}


def answered(second: float, id_: str) -> dict[str, Any]:
    return {"time_s": second, "what": "answered", "id": id_}


def judged(folder: Path, lines: list[dict[str, Any]], killed_s: tuple[float, ...] = ()) -> dict[str, int]:
    log = folder / "log"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    received = Received(log)
    received.news(killed_s)
    return dict(received.faults)


def test_what_was_answered_must_not_come_again(tmp_path: Path) -> None:
    lines = [got(1.0, event("a")), answered(1.1, "a"), got(50.0, event("a"))]
    assert judged(tmp_path, lines) == {"repeated": 1}


def test_what_was_answered_when_the_server_died_may_come_again(tmp_path: Path) -> None:
    lines = [got(1.0, event("a")), answered(1.1, "a"), got(50.0, event("a"))]
    assert judged(tmp_path, lines, killed_s=(1.5,)) == {}
    assert judged(tmp_path, lines, killed_s=(40.0,)) == {"repeated": 1}


def test_what_was_not_answered_may_come_again_unchanged(tmp_path: Path) -> None:
    assert judged(tmp_path, [got(1.0, event("a")), got(5.0, event("a"))]) == {}
    assert judged(tmp_path, [got(1.0, event("a", 1)), got(5.0, event("a", 2))]) == {"changed": 1}


def test_events_of_an_incident_come_in_their_order_and_others_in_any(tmp_path: Path) -> None:
    assert judged(tmp_path, [got(1.0, event("a", 5)), got(2.0, event("b", 4, "inc_2"))]) == {}
    assert judged(tmp_path, [got(1.0, event("a", 5)), got(2.0, event("b", 4))]) == {"out_of_order": 1}


def test_a_signature_that_does_not_fit_is_reported(tmp_path: Path) -> None:
    assert judged(tmp_path, [{"time_s": 1.0, "what": "unsigned", "id": "a", "why": "no"}]) == {"unsigned": 1}


@pytest.mark.parametrize("duration_s", [60.0, 3_600.0, 86_400.0])
def test_the_server_is_left_alone_through_the_second_half(duration_s: float) -> None:
    made = plan(duration_s, 500, 8, 1)
    assert made.server_restarts
    assert max(at_s for at_s, _ in made.server_restarts) < 0.35 * duration_s
    assert {how for _, how in made.server_restarts} == {"kill", "terminate"}
    assert any(at_s > 0.5 * duration_s for at_s in made.subscriber_kills)
    assert 2 * made.settings["retention_s"] <= 0.5 * duration_s or duration_s < 600.0


def test_the_same_seed_makes_the_same_plan() -> None:
    assert plan(600.0, 100, 8, 7) == plan(600.0, 100, 8, 7)
    assert plan(600.0, 100, 8, 7) != plan(600.0, 100, 8, 8)
