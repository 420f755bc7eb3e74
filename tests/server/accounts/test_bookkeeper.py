"""The past kept in a real store: over restarts, over a disk that fails, within limits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Rank
from eagle_eye.server.accounts import bookkeeper as module
from eagle_eye.server.accounts.bookkeeper import GPUS_PER_NODE_MAX, PRUNE_EVERY_S, Bookkeeper
from eagle_eye.server.accounts.goodput import WRITE_S
from eagle_eye.server.accounts.trust import AccountSettings
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.store.sql_store import open_file
from eagle_eye.server.store.store import ATTEMPTS, DRIVER_ERRORS, GPUS, MEMBERSHIPS, Change
from tests.server.accounts.past import course
from tests.server.builders import NOW, FakeClock, FakeWatcher, frame


class Office:
    """A bookkeeper over a real store, on a clock that moves when told to."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.store = open_file(folder / "records.db")
        self.fleet = Fleet(100)
        self.dropped: Counter[str] = Counter()
        self.books = self.reopened()

    def reopened(self) -> Bookkeeper:
        """Return a bookkeeper that begins with what is on record."""
        watcher = FakeWatcher(self.clock)
        settings = AccountSettings()
        self.books = Bookkeeper(
            self.store, watcher, self.fleet, self.clock, settings, lambda why: self.dropped.update([why])
        )
        return self.books

    def look(self, at: float, *courses: Any, heard: bool = True) -> None:
        self.clock.time_s = NOW + at
        if heard:
            self.fleet.heard(frame(int(at) + 1, time_s=NOW + at, ranks=[Rank("job", 0, 0, 0)]), NOW + at)
        self.books.write_changes(courses, NOW + at)

    def gpu(self, uuid: str = "GPU-1", node: str = "n1", device: int = 0, at: float = 0) -> None:
        self.books.record_events(node, [Event(NOW + at, "inventory", device, {"uuid": uuid, "model": "H100"})])

    def xid(self, code: int = 79, node: str = "n1", device: int = 0, at: float = 0) -> None:
        self.books.record_events(node, [Event(NOW + at, "xid", device, {"code": code, "text": "x"})])


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


def test_an_attempt_goes_on_over_a_restart_with_the_gap_that_it_left(office: Office) -> None:
    office.look(0, course())
    office.look(10, course(step=5, at=9))
    office.reopened()
    office.look(300, course(step=90, at=299))
    (attempt,) = office.store.all(ATTEMPTS)
    assert (attempt.first_step_s, attempt.last_step) == (NOW + 1, 90)
    assert [(gap.start_s - NOW, gap.end_s - NOW) for gap in attempt.gaps] == [(10, 300)]


def test_steps_alone_are_written_now_and_then(office: Office) -> None:
    office.look(0, course(step=1))
    changes = []
    office.store.listen(lambda: changes.append(office.clock.time_s - NOW))
    for at in range(10, 100, 10):
        office.look(at, course(step=at, at=at))
    assert changes == [WRITE_S, 2 * WRITE_S, 3 * WRITE_S]


def test_who_takes_part_is_written_when_it_changes(office: Office) -> None:
    office.look(0, course())
    office.look(10, course(nodes=("n1", "n2", "n3")))
    (membership,) = office.store.all(MEMBERSHIPS)
    assert membership.nodes == ["n1", "n2", "n3"]
    assert membership.id == office.store.all(ATTEMPTS)[0].id


def test_nothing_is_lost_to_a_disk_that_fails_for_a_while(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    office.look(0, course(step=1))
    office.gpu()
    office.xid()

    def fail(_change: Change) -> None:
        raise StoreUnavailable("the records cannot be written: disk full")

    with monkeypatch.context() as broken:
        broken.setattr(office.store, "commit", fail)
        with pytest.raises(StoreUnavailable):
            office.look(10, course(step=2, state="finished"))
    office.xid(at=5)
    office.look(20, course(step=2, state="finished"))
    (attempt,) = office.store.all(ATTEMPTS)
    assert (attempt.end, attempt.ended_s) == ("finished", NOW + 10)
    assert [gpu.uuid for gpu in office.store.all(GPUS)] == ["GPU-1"]
    assert [(error.code, error.count) for error in office.store.all(DRIVER_ERRORS)] == [(79, 2)]


def test_a_gpu_takes_its_errors_along_and_leaves_none_to_its_successor(office: Office) -> None:
    office.gpu("GPU-1", "n1")
    office.look(0)
    office.xid(79, "n1", at=1)
    office.look(10)
    office.gpu("GPU-1", "n2", at=20)
    office.gpu("GPU-2", "n1", at=20)
    office.look(30)
    office.xid(79, "n1", at=31)
    office.look(40)
    by_gpu = {error.uuid: (error.node, error.count) for error in office.store.all(DRIVER_ERRORS)}
    assert by_gpu == {"GPU-1": ("n1", 1), "GPU-2": ("n1", 1)}
    assert [(gpu.uuid, gpu.node) for gpu in office.store.all(GPUS)] == [("GPU-1", "n2"), ("GPU-2", "n1")]


def test_a_flood_of_one_error_is_one_record(office: Office) -> None:
    for at in range(5_000):
        office.xid(at=at)
    office.look(10)
    (error,) = office.store.all(DRIVER_ERRORS)
    assert (error.count, error.first_s, error.last_s) == (5_000, NOW, NOW + 4_999)


def test_one_node_invents_no_more_gpus_and_errors_than_a_limit(office: Office) -> None:
    for number in range(GPUS_PER_NODE_MAX + 7):
        office.gpu(f"GPU-{number}")
    for number in range(module.ERRORS_PER_NODE_MAX + 3):
        office.xid(number + 1)
    office.look(0)
    assert len(office.store.all(GPUS)) == GPUS_PER_NODE_MAX
    assert len(office.store.all(DRIVER_ERRORS)) == module.ERRORS_PER_NODE_MAX
    assert office.dropped == {"gpus_of_node": 7, "errors_of_node": 3}


def test_what_waits_for_the_next_look_has_a_limit(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PENDING_MAX", 2)
    for number in range(5):
        office.gpu(f"GPU-{number}")
        office.xid(number + 1)
    assert office.dropped == {"gpu_backlog": 3, "error_backlog": 3}


def test_a_job_that_nobody_remembers_is_gone_only_after_agents_had_time_to_speak(office: Office) -> None:
    office.look(0, course(declared=False))
    office.reopened()
    office.look(1_000)
    assert office.store.all(ATTEMPTS)[0].end == ""
    office.look(1_400)
    (attempt,) = office.store.all(ATTEMPTS)
    assert (attempt.end, attempt.ended_s) == ("gone", NOW)


def test_what_is_old_is_forgotten(office: Office) -> None:
    office.look(0, course(step=1))
    office.look(10, course(step=1, state="finished"))
    later = AccountSettings().retention_s + 100
    office.look(later, heard=False)
    assert later > PRUNE_EVERY_S
    assert (office.store.count(ATTEMPTS), office.store.count(MEMBERSHIPS)) == (0, 0)
