"""Two processes that decide at the same moment: one decides, the other learns of it.

Each has the records open for itself. The second begins while the first has read, and has not written yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from eagle_eye.server.engine import ledger
from eagle_eye.server.engine.engine import Engine
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import AuditEntry
from eagle_eye.server.monitor.detection_loop import DetectionLoop
from eagle_eye.server.store.sql_store import SqlStore
from eagle_eye.server.store.store import ACTIONS, INCIDENTS, Change, Store
from tests.server.builders import NOW, action, incident
from tests.server.engine.frames import SETTINGS, Fleet
from tests.server.postgresql_server import Opens
from tests.server.test_watch import TwoClocks

IN_TIME_S = 60.0
HELD_UP_S = 0.5  # within which the second would be done, if nothing held it up


@pytest.fixture
def other(opens: Opens, store: SqlStore) -> Iterator[SqlStore]:
    """The same records, as another process has them open."""
    made = opens()
    yield made
    made.close()


class Between:
    """Has ``second`` begin to decide in ``other`` when a decision of ``store`` was computed and is not written yet."""

    def __init__(
        self, store: SqlStore, other: SqlStore, second: Callable[[], object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._first, self._second = store.update, other.update
        self._began, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(second,))
        self.held_up = False
        self.error: BaseException | None = None
        monkeypatch.setattr(store, "update", self._interrupted)
        monkeypatch.setattr(other, "update", self._beginning)

    def _run(self, second: Callable[[], object]) -> None:
        try:
            second()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        self._done.set()

    def _beginning(self, work: Callable[[Store], Change]) -> Change:
        self._began.set()
        return self._second(work)

    def _interrupted(self, work: Callable[[Store], Change]) -> Change:
        def computed(inner: Store) -> Change:
            change = work(inner)
            if not change.empty and self._thread.ident is None:
                self._thread.start()
                assert self._began.wait(IN_TIME_S)
                self.held_up = not self._done.wait(HELD_UP_S)
            return change

        return self._first(computed)

    def finish(self) -> None:
        """Wait for the second; fail unless it was held up until the first had written."""
        self._thread.join(IN_TIME_S)
        assert self._done.is_set()
        assert self.held_up


class Watched:
    """A job as one server's detection loop sees it, which is about to hang."""

    def __init__(self, store: SqlStore, policy: PolicySettings, job: str = "j") -> None:
        self.clock = TwoClocks()
        self.fleet = Fleet(4)
        self.fleet.job, self.fleet.nodes = job, [f"{job}-n{number}" for number in range(4)]
        engine = Engine(SETTINGS, watching_since_s=self.clock.now_s())
        self.loop = DetectionLoop(engine, store, self.clock, policy, "http://eagle-eye:8470")
        self._run(30)
        self.fleet.stopped, self.fleet.silent_s = True, {self.fleet.nodes[1]: 9.0}

    def judge(self) -> None:
        """Have it hang, and be judged."""
        self._run(12)

    def _run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.advance(1.0)
            self.fleet.now_s = self.clock.now_s()
            self.fleet.step += 0.0 if self.fleet.stopped else 1.0
            for node in self.fleet.nodes:
                self.loop.observe(self.fleet.frame(node), self.clock.now_s(), 0.0)
            self.loop.tick(self.clock.now_s())


def test_two_servers_that_see_one_hang_open_one_incident_and_request_one_action(
    store: SqlStore, other: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = PolicySettings(mode="act", verdict_gone_s=10)
    first, second = Watched(store, policy), Watched(other, policy)
    between = Between(store, other, second.judge, monkeypatch)
    first.judge()
    between.finish()
    assert between.error is None
    assert [(one.fault, one.nodes) for one in store.all(INCIDENTS)] == [("hang", ["j-n1"])]
    assert [(one.kind, one.exclude) for one in store.all(ACTIONS)] == [("exclude_node", ["j-n1"])]


@pytest.mark.parametrize("budget", [1, 2])
def test_two_servers_exclude_no_more_nodes_than_the_budget_of_the_fleet_allows(
    store: SqlStore, other: SqlStore, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    policy = PolicySettings(mode="act", exclusions_fleet_ratio=0.0, exclusions_fleet_floor=budget)
    first, second = Watched(store, policy, "a"), Watched(other, policy, "b")
    between = Between(store, other, second.judge, monkeypatch)
    first.judge()
    between.finish()
    assert between.error is None
    assert len(store.all(INCIDENTS)) == 2
    assert len([one for one in store.all(ACTIONS) if one.kind == "exclude_node"]) == budget


def test_an_action_is_approved_once(store: SqlStore, other: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.commit(Change(actions=(action(state="awaiting"),)))

    def approve(records: SqlStore, who: str) -> None:
        def work(inner: Store) -> Change:
            found = inner.get(ACTIONS, "act_1")
            assert found is not None
            approved = ledger.approve(found, NOW)
            entry = AuditEntry(time_s=NOW, who=who, verb="approve", subject="act_1")
            return Change() if approved is found else Change(actions=(approved,), audit=(entry,))

        records.update(work)

    between = Between(store, other, lambda: approve(other, "second"), monkeypatch)
    approve(store, "first")
    between.finish()
    assert between.error is None
    assert [entry.who for entry in store.audit().items] == ["first"]


def test_a_reader_that_follows_the_changes_misses_none_of_several_writers(opens: Opens, store: SqlStore) -> None:
    def write(name: str) -> None:
        records = opens()
        for number in range(20):
            records.commit(Change(incidents=tuple(incident(f"{name}-{number}-{part}") for part in range(3))))
        records.close()

    writers = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for writer in writers:
        writer.start()
    seen: list[str] = []
    last = 0
    while any(writer.is_alive() for writer in writers) or store.changes_since(last, 1):
        for change in store.changes_since(last, 100):
            last = change.sequence
            seen.append(change.key)
    assert len(seen) == len(set(seen)) == 180
