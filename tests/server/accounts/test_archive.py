"""Nodes' pasts read back from a real store: what is held against a node, and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle_eye.server.accounts.archive import SCORES_FRESH_S, Archive
from eagle_eye.server.accounts.node_records import RECURRENT_MIN, NodeRecord, RecurrenceScore
from eagle_eye.server.model.records import AttemptMembers, AuditEntry, DriverError, Gpu, Seat
from eagle_eye.server.store.sql_store import open_file
from eagle_eye.server.store.store import Change
from tests.server.accounts.past import DAY, attempt, known, three_failures
from tests.server.builders import NOW, FakeClock, action, incident


class Room:
    """An archive over a real store, on a clock that moves when told to."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.store = open_file(folder / "records.db")
        self.archive = Archive(self.store, self.clock, 2 * DAY)

    def commit(self, **records: Any) -> None:
        self.store.commit(Change(**records))

    def recurrence(self, node: str = "n1") -> RecurrenceScore:
        return self.archive.scores().by_node[node]

    def past(self, node: str = "n1") -> NodeRecord:
        return self.archive.scores().pasts[node]


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path)


@pytest.mark.parametrize(
    "pardon",
    [
        {"state": "false"},
        {"merged_into": "inc_0"},
        {"application": True},
        {"action": "notify"},
        {"node": None},
        {"fault": "recurrent_node"},
    ],
)
def test_what_was_not_the_nodes_fault_is_not_held_against_it(room: Room, pardon: dict[str, Any]) -> None:
    guilty = [incident(f"inc_{n}", job=f"job{n}", detected_s=NOW - n * DAY, **pardon) for n in range(1, 5)]
    room.commit(nodes=(known(),), incidents=tuple(guilty))
    assert room.recurrence().score == 0


def test_several_incidents_of_one_attempt_are_one_failure(room: Room) -> None:
    room.commit(nodes=(known(),), incidents=(incident("inc_1"), incident("inc_2", fault="gpu_lost")))
    assert (room.past().multi_node_failures, room.past().incidents) == (1, 2)


def test_what_failed_alone_is_told_from_what_failed_among_many(room: Room) -> None:
    alone = attempt(0, -100, 10, nodes=1, node="n1")
    room.commit(nodes=(known(),), attempts=(alone,), incidents=(incident(),))
    assert (room.past().single_node_failures, room.past().multi_node_failures) == (1, 0)
    assert room.past().single_node_attempts == 1


def out(hours_ago: float, verb: str, who: str = "tok_1") -> AuditEntry:
    return AuditEntry(time_s=NOW - hours_ago * 3_600, who=who, verb=verb, subject="n1")


def test_each_time_out_of_service_counts_once_whoever_reported_it(room: Room) -> None:
    first = (out(50, "exclude"), out(49.9, "draining", "slurm"), out(49.8, "excluded", "slurm"), out(30, "readmit"))
    room.commit(nodes=(known(),), audit=(*first, out(20, "drain"), out(10, "in_service", "slurm")))
    assert room.past().taken_out == 2


def test_driver_errors_count_by_code_and_only_those_of_the_hardware(room: Room) -> None:
    def error(code: int, device: int = 0, last_s: float = NOW) -> DriverError:
        id_ = f"{code}:{device}"
        return DriverError(
            id=id_, node="n1", device=device, uuid="", kind="xid", code=code, count=9, first_s=0.0, last_s=last_s
        )

    # 13 is the program's, 9999 nobody knows, 63 is long ago.
    reported = (error(79), error(79, 1), error(74), error(13), error(9_999), error(63, last_s=NOW - 30 * DAY))
    room.commit(nodes=(known(),), driver_errors=reported)
    assert room.past().driver_errors == 2


def test_what_is_long_ago_is_forgiven(room: Room) -> None:
    three_failures(room.store)
    before = room.recurrence().score
    room.clock.advance(15 * DAY + SCORES_FRESH_S)
    later = room.recurrence().score
    room.clock.advance(30 * DAY)
    assert before is not None
    assert later is not None
    assert before > RECURRENT_MIN > later > 0
    assert room.recurrence().score == 0


@pytest.mark.parametrize(("started_s", "cut"), [(NOW + 60, True), (NOW - 60, False)])
def test_where_a_limit_left_out_what_followed_the_answer_says_so(
    room: Room, monkeypatch: pytest.MonkeyPatch, started_s: float, cut: bool
) -> None:
    monkeypatch.setattr("eagle_eye.server.accounts.archive.MEMBERSHIPS_MAX", 2)
    members = tuple(AttemptMembers(id=f"att_{n}", job="job", started_s=started_s, nodes=["n1"]) for n in range(3))
    room.commit(incidents=(incident(),), actions=(action(state="would_act"),), memberships=members)
    claims, is_cut = room.archive.claims(NOW - DAY)
    assert (len(claims), is_cut) == (1, cut)


def test_a_gpu_brings_its_failures_along(room: Room) -> None:
    three_failures(room.store)
    seat = Seat("n1", 0, NOW - 90 * DAY, NOW - DAY)
    moved = Gpu(
        uuid="GPU-1",
        node="n2",
        device=3,
        model="H100",
        since_s=NOW - DAY,
        first_seen_s=NOW - 90 * DAY,
        seen_s=NOW,
        moves=[seat],
    )
    room.commit(gpus=(moved,))
    (signal,) = room.recurrence("n2").contributions
    assert (signal.signal, signal.value) == ("inherited_failures", 3)
