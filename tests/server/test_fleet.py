from __future__ import annotations

import pytest

from eagle_eye.schema.frame import Rank
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.errors import Refusal
from tests.server.builders import NOW, frame


def test_close_clocks_are_left_alone() -> None:
    fleet = Fleet(10)
    assert fleet.offset_s("n1", NOW, NOW + 1.9) == 0.0
    assert fleet.offsets() == {"n1": pytest.approx(1.9)}


def test_a_clock_that_is_off_is_corrected_by_the_least_delayed_request() -> None:
    fleet = Fleet(10)
    assert fleet.offset_s("n1", NOW - 100, NOW + 7) == pytest.approx(107.0)
    assert fleet.offset_s("n1", NOW - 95, NOW + 5.1) == pytest.approx(100.1)
    assert fleet.offset_s("n1", NOW - 90, NOW + 30) == pytest.approx(100.1)


def test_a_clock_that_is_ahead_is_corrected_too() -> None:
    fleet = Fleet(10)
    assert fleet.offset_s("n1", NOW + 50, NOW + 0.1) == pytest.approx(-49.9)


def test_a_repaired_clock_is_believed_within_two_minutes() -> None:
    fleet = Fleet(10)
    fleet.offset_s("n1", NOW + 50, NOW)
    for second in range(1, 130):
        offset_s = fleet.offset_s("n1", NOW + second, NOW + second + 0.01)
    assert offset_s == 0.0


def test_a_request_that_waited_for_an_hour_does_not_move_the_estimate() -> None:
    fleet = Fleet(10)
    fleet.offset_s("n1", NOW, NOW)
    assert fleet.offset_s("n1", NOW + 1, NOW + 20) == 0.0


def test_more_nodes_than_the_limit_are_not_admitted() -> None:
    fleet = Fleet(2)
    fleet.know("old")
    assert fleet.heard(frame(node="n1"), NOW)
    assert not fleet.heard(frame(2, node="n1"), NOW)
    fleet.check_room("n1")
    fleet.check_room("old")
    with pytest.raises(Refusal, match=r"ingest\.nodes_max"):
        fleet.check_room("n2")


def test_a_node_is_recent_by_its_last_word_in_this_run_or_the_one_before() -> None:
    fleet = Fleet(10)
    fleet.know("left", NOW - 9_000)
    fleet.know("silent since the restart", NOW - 100)
    fleet.know("silent since the restart", NOW - 9_000)  # another of its streams
    fleet.know("back", NOW - 9_000)
    fleet.know("known by its record alone")
    fleet.heard(frame(node="back"), NOW)
    assert (fleet.recent(NOW - 3_600), fleet.recent(NOW - 10_000)) == (2, 3)


def test_the_jobs_that_agents_speak_of_have_their_newest_attempts_ranks() -> None:
    fleet = Fleet(10)
    fleet.heard(frame(node="n1", ranks=[Rank("job", 0, 2, 0, attempt=1)]), NOW)
    fleet.heard(frame(node="n2", ranks=[Rank("job", 1, 2, 3, attempt=2)]), NOW)
    fleet.heard(frame(node="n3", job="quiet", ranks=[]), NOW)
    jobs = fleet.jobs()
    assert jobs["job"][0] == 2
    assert [(rank.rank, rank.node, rank.device) for rank in jobs["job"][1]] == [(1, "n2", 3)]
    assert jobs["quiet"] == (0, [])


def test_an_agents_troubles_are_kept_and_bounded() -> None:
    fleet = Fleet(10)
    said = {f"c{number}": "failed: no" for number in range(100)}
    fleet.heard(frame(collectors={"nvml": "ok", **said}), NOW)
    heard = fleet.last("n1")
    assert heard is not None
    assert "nvml" not in heard.troubles
    assert len(heard.troubles) == 32


def test_a_frame_is_late_that_waited_while_a_newer_one_was_heard() -> None:
    fleet = Fleet(10)
    past = frame(1, time_s=NOW - 60)
    assert not fleet.is_late(past, NOW)  # nothing newer is known
    fleet.heard(frame(2, node="n2"), NOW)
    assert not fleet.is_late(past, NOW)
    fleet.heard(frame(2), NOW)
    assert fleet.is_late(past, NOW)
    assert not fleet.is_late(past, NOW - 55)  # it was sent as soon as it could be
    assert not fleet.is_late(frame(3, time_s=NOW + 1), NOW + 60)
