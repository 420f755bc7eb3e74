"""Frames that a former leader acknowledged and agents send again to the next one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import KEPT_HEADER, Frame
from eagle_eye.server.ingest import fleet as module
from eagle_eye.server.ingest.fleet import RESEND_PATIENCE_S, RESEND_S, Resends
from tests.server.builders import NOW, FakeClock, Running, acknowledged, body, frame, running

KEPT = KEPT_HEADER.lower().replace("-", "_")
XID = Event(NOW - 300.0, "xid", 0, {"code": 79})


def kept(sequence: int, **more: Any) -> Frame:
    return frame(sequence, time_s=NOW - 1000 + sequence, **more)


def again(server: Running, *frames: Frame, left: int = 0) -> httpx.Response:
    return server.send(body(*frames), **{KEPT: str(left)})


def shown(server: Running) -> list[int]:
    return [seen.sequence for seen, _, _ in server.watcher.frames]


def test_an_answer_names_the_journal_which_a_restart_keeps_and_an_empty_folder_does_not(tmp_path: Path) -> None:
    names = []
    for folder, sequence in (("a", 1), ("a", 2), ("b", 3)):
        with running(tmp_path / folder) as server:
            names.append(server.send(body(frame(sequence))).json()["journal"])
    assert names[0] == names[1] != names[2]


def test_a_frame_sent_again_is_acknowledged_and_counted_once(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.send(body(frame(1000)))
        for accepted in (2, 0):
            answer = again(server, kept(900), kept(901), left=0)
            assert acknowledged(answer) == {"accepted": accepted, "duplicates": 2 - accepted, "watermark": 1000}
        kept_frames = server.dispatcher.services.history.query(["n1"], NOW - 2000, NOW + 1)
        assert [recorded.frame.sequence for recorded in kept_frames] == [900, 901, 1000]
        assert server.metric("ingest_resent_frames_total") == 4


def test_a_frame_sent_again_is_no_news_however_young(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.send(body(frame(1000)))
        again(server, kept(997), kept(998), kept(999))
        assert shown(server) == [1000]
        assert server.dispatcher.services.fleet.presence("n1") is not None
        last = server.dispatcher.services.fleet.last("n1")
        assert last is not None
        assert last.time_s == NOW


def test_facts_sent_again_are_judged_at_once_and_enter_the_accounts_no_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as server:
        noted: list[object] = []
        monkeypatch.setattr(server.dispatcher.services.bookkeeper, "record_events", lambda *told: noted.append(told))
        server.send(body(frame(1000)))
        again(server, kept(700, events=[XID]))
        assert [event for seen, _, _ in server.watcher.frames for event in seen.events] == [XID]
        assert noted == []


def test_windows_read_anew_have_what_was_sent_again_in_the_order_of_time(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.send(body(frame(1000)))
        again(server, kept(990), kept(991), left=2)
        again(server, kept(980), kept(981), left=0)
        past = [one for one in server.watcher.past() if not hasattr(one, "resolved")]
        assert [seen.sequence for seen, _ in past] == [980, 981, 990, 991, 1000]
        assert server.watcher.resends.ready()


def test_a_crowd_of_agents_is_told_to_take_turns(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        answer = server.send(body(frame(1))).json()
        assert "resend_seconds" not in answer
        fleet = server.dispatcher.services.fleet
        for number in range(12_500):
            fleet.know(f"m{number}")
        answer = server.send(body(frame(2))).json()
        assert answer["resend_seconds"] == pytest.approx(12_501 * RESEND_S, abs=0.01)


def test_many_requests_of_kept_frames_at_a_time_are_refused_and_no_live_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_eye.server.ingest.frames.RESENT_AT_ONCE_MAX", 0)
    with running(tmp_path) as server:
        assert server.send(body(frame(1000))).status_code == 200
        refused = again(server, kept(900))
        assert (refused.status_code, refused.json()["reason"]) == (503, "busy")
        assert server.send(body(frame(1001, time_s=NOW + 1))).status_code == 200


@pytest.mark.parametrize("said", ["", "-1", "many", "9" * 20, "1.5"])
def test_a_header_that_is_no_number_makes_a_request_like_any_other(tmp_path: Path, said: str) -> None:
    with running(tmp_path) as server:
        server.send(body(frame(1000)))
        assert server.send(body(kept(1)), **{KEPT: said}).status_code == 200
        assert server.metric("ingest_resent_frames_total") == 0


class Fleet:
    """Resends of a fleet, on a fake clock."""

    def __init__(self, nodes: int = 2, frames_max: int = 500_000) -> None:
        self.clock = FakeClock()
        self.resends = Resends(NOW, 900.0, frames_max, lambda: nodes, lambda: self.clock.time_s)

    def missing(self) -> list[str]:
        return sorted(self.resends.incomplete())


def test_a_node_that_sends_again_is_incomplete_until_nothing_is_left() -> None:
    fleet = Fleet()
    fleet.resends.record_request("n1", 64, NOW - 60)
    assert (fleet.missing(), fleet.resends.ready()) == (["n1"], False)
    assert "n1" in fleet.resends.problem()
    fleet.resends.record_request("n1", 0, NOW - 120)
    assert (fleet.missing(), fleet.resends.ready(), fleet.resends.problem()) == ([], True, "")
    fleet.resends.taken_in()
    assert not fleet.resends.ready()


def test_windows_are_ready_when_the_last_of_the_nodes_is() -> None:
    fleet = Fleet()
    fleet.resends.record_request("n1", 0, NOW - 60)
    fleet.resends.record_request("n2", 7, NOW - 60)
    assert not fleet.resends.ready()
    fleet.resends.record_request("n2", 0, NOW - 120)
    assert fleet.resends.ready()


def test_a_node_that_comes_later_has_the_windows_read_once_more_but_not_at_once() -> None:
    fleet = Fleet()
    fleet.resends.record_request("n1", 0, NOW - 60)
    fleet.resends.taken_in()
    fleet.resends.record_request("n2", 0, NOW - 60)
    assert not fleet.resends.ready()
    fleet.clock.advance(module.REFILL_EVERY_S)
    assert fleet.resends.ready()


def test_nodes_that_may_send_again_are_awaited_for_a_little() -> None:
    fleet = Fleet()
    fleet.resends.expect(["n1", "n2"])
    assert fleet.missing() == ["n1", "n2"]
    fleet.resends.record_request("n1", 0, NOW - 60)
    assert (fleet.missing(), fleet.resends.ready()) == (["n2"], False)
    fleet.clock.advance(RESEND_PATIENCE_S + 1)  # an agent of an earlier version, or a node that is gone
    assert (fleet.missing(), fleet.resends.ready()) == ([], True)


def test_a_node_that_falls_silent_while_it_sends_again_is_not_awaited_for_ever() -> None:
    fleet = Fleet()
    fleet.resends.record_request("n1", 300, NOW - 60)
    fleet.clock.advance(RESEND_PATIENCE_S + 1)
    assert (fleet.missing(), fleet.resends.ready()) == ([], True)


def test_a_node_that_reaches_back_as_far_as_detection_is_shown_is_complete() -> None:
    fleet = Fleet(nodes=5_000, frames_max=500_000)  # a hundred seconds
    fleet.resends.record_request("n1", 800, NOW - 64)
    assert fleet.missing() == ["n1"]
    fleet.resends.record_request("n1", 736, NOW - 128)
    assert fleet.missing() == []


def test_windows_that_live_frames_have_filled_are_not_read_anew() -> None:
    fleet = Fleet(nodes=12_500, frames_max=500_000)
    fleet.resends.record_request("n1", 0, NOW - 900)
    fleet.clock.advance(41.0)
    assert (fleet.missing(), fleet.resends.ready()) == ([], False)


def test_a_requests_time_is_bounded() -> None:
    assert Fleet(nodes=10_000_000).resends.every_s() == module.RESEND_EVERY_S_MAX
