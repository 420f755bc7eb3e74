"""Of several servers on one PostgreSQL, only the one that leads commits anything, whatever the others believe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from eagle_eye.schema.action import ActionClaim
from eagle_eye.server.admin import records_command
from eagle_eye.server.delivery.events import claimed_action
from eagle_eye.server.model.errors import IllegalTransition, NotLeading, StoreUnavailable
from eagle_eye.server.store.leadership import Leadership
from eagle_eye.server.store.postgresql import PostgresqlDatabase
from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.store.sql_store import SqliteFile, SqlStore, leadership_of, open_file, open_records
from eagle_eye.server.store.store import ACTIONS, DELIVERIES, INCIDENTS, Change, Store
from tests.server.builders import action, event, incident, subscription
from tests.server.postgresql_server import PostgresqlServer

LEASE_S = 1.0
WITHIN_S = 20.0


@dataclass
class Server:
    """A server's part in leading, which renews or looks when it is told to, and its records. Its clock stands still."""

    url: str
    database: str
    time_s: float = 0.0

    def __post_init__(self) -> None:
        self.settings = RecordsSettings(self.database, lease_s=LEASE_S)
        self.leadership: Leadership = leadership_of(self.settings, self.url, lambda: self.time_s)
        try:
            self.leadership.step()
            self.store: SqlStore = open_records(self.settings, Path("/-"), self.leadership)
        except BaseException:
            self.leadership.close()  # its connection would be found by the garbage collector, in some later test
            raise

    @property
    def name(self) -> str:
        return self.database.partition("@/")[2].partition("?")[0]

    def take_over(self) -> None:
        """Lead, after a lease in which nobody gave a sign of life."""
        deadline_s = time.monotonic() + WITHIN_S
        while not self.leadership.leads:
            assert time.monotonic() < deadline_s
            self.leadership.step()
            self.time_s += 0.0 if self.leadership.leads else LEASE_S
        self.store.close()
        self.store = open_records(self.settings, Path("/-"), self.leadership)

    def close(self) -> None:
        self.store.close()
        self.leadership.close()


@pytest.fixture
def serve(postgresql: PostgresqlServer) -> Iterator[Callable[[str], Server]]:
    """What makes servers on one database."""
    database = postgresql.new_database()
    made: list[Server] = []

    def one(url: str) -> Server:
        made.append(Server(url, database))
        return made[-1]

    yield one
    for server in made:
        server.close()


@pytest.fixture
def both(serve: Callable[[str], Server]) -> tuple[Server, Server]:
    """A leader and its standby."""
    return serve("http://a"), serve("http://b")


def test_a_standby_reads_and_writes_nothing(both: tuple[Server, Server]) -> None:
    leader, standby = both
    leader.store.commit(Change(incidents=(incident(),)))
    assert standby.store.open_incidents() == [incident()]
    with pytest.raises(NotLeading, match="stands by"):
        standby.store.commit(Change(incidents=(incident("other"),)))


@pytest.mark.parametrize("ended", [True, False], ids=["session ended", "session left"])
def test_who_leads_no_more_commits_nothing_while_it_believes_that_it_leads(
    both: tuple[Server, Server], postgresql: PostgresqlServer, ended: bool
) -> None:
    before, after = both
    before.store.commit(Change(subscriptions=(subscription(),), events=(event(),)))
    (waiting,) = before.store.all(DELIVERIES)
    if not ended:
        postgresql.execute("UPDATE lease SET backend_pid = 0", before.name)
    after.take_over()
    assert before.leadership.epoch_to_decide() == 1
    for write in (
        lambda: before.store.commit(Change(deliveries=(replace(waiting, state="failed"),))),
        lambda: before.store.update(lambda _: Change(incidents=(incident("late"),))),
        lambda: before.store.prune(1e12, 0.0),
        before.store.probe,
    ):
        with pytest.raises(StoreUnavailable):
            write()
    assert after.store.get(DELIVERIES, waiting.id) == waiting
    with pytest.raises(NotLeading, match=r"another server leads"):
        before.store.commit(Change(incidents=(incident("late"),)))
    assert after.store.all(INCIDENTS) == []
    after.store.commit(Change(incidents=(incident("new"),)))
    assert [one.id for one in before.store.open_incidents()] == ["new"]


@dataclass
class Stopped:
    """A server that is stopped in the middle of a transaction, until it is woken."""

    server: Server
    work: Callable[[Store], Change] = lambda _: Change(incidents=(incident("half"),))

    def __post_init__(self) -> None:
        self.inside, self.woken = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._write)
        self.thread.start()
        assert self.inside.wait(WITHIN_S)

    def _write(self) -> None:
        def decided(store: Store) -> Change:
            change = self.work(store)
            self.inside.set()
            self.woken.wait(WITHIN_S)
            return change

        try:
            self.server.store.update(decided)
        except StoreUnavailable as error:
            self.error = error

    def wake(self) -> None:
        self.woken.set()
        self.thread.join(WITHIN_S)


def test_a_leader_that_was_stopped_in_a_transaction_commits_nothing_when_it_wakes(both: tuple[Server, Server]) -> None:
    before, after = both
    before.store.probe()  # so that the lease names its session
    stopped = Stopped(before)
    after.take_over()
    after.store.commit(Change(incidents=(incident("new"),)))
    stopped.wake()
    assert stopped.error is not None
    assert [one.id for one in after.store.all(INCIDENTS)] == ["new"]


def test_a_session_that_cannot_be_ended_keeps_the_epoch_from_rising_until_postgresql_ends_its_transaction(
    both: tuple[Server, Server], postgresql: PostgresqlServer
) -> None:
    before, after = both
    before.store.probe()
    postgresql.execute("UPDATE lease SET backend_pid = 0", before.name)
    stopped = Stopped(before)
    after.take_over()
    stopped.wake()
    assert stopped.error is not None
    assert after.store.all(INCIDENTS) == []


def epoch_kept(server: Server, postgresql: PostgresqlServer) -> int:
    ((epoch,),) = postgresql.execute("SELECT epoch FROM lease", server.name)
    return int(epoch)


def test_a_leader_that_rises_writes_on_and_its_standby_stands_by(
    both: tuple[Server, Server], postgresql: PostgresqlServer
) -> None:
    leader, standby = both
    leader.store.commit(Change(incidents=(incident(),)))
    assert leader.leadership.rise_above(7) == 8
    leader.store.commit(Change(incidents=(incident("other"),)))
    standby.leadership.step()
    assert (epoch_kept(leader, postgresql), standby.leadership.leads, standby.leadership.epoch) == (8, False, 8)


def test_a_former_leader_raises_no_epoch(both: tuple[Server, Server], postgresql: PostgresqlServer) -> None:
    before, after = both
    after.take_over()
    assert before.leadership.rise_above(7) is None
    assert epoch_kept(after, postgresql) == 2
    after.store.commit(Change(incidents=(incident(),)))


def test_what_is_being_written_and_what_waits_to_be_is_written_while_the_epoch_rises(
    both: tuple[Server, Server], postgresql: PostgresqlServer
) -> None:
    leader, _ = both
    leader.store.probe()
    stopped = Stopped(leader)
    waiting = threading.Thread(target=leader.store.commit, args=(Change(incidents=(incident("waiting"),)),))
    rising = threading.Thread(target=leader.leadership.rise_above, args=(7,))
    for thread in (waiting, rising):
        thread.start()
    stopped.wake()
    for thread in (waiting, rising):
        thread.join(WITHIN_S)
    assert (stopped.error, epoch_kept(leader, postgresql)) == (None, 8)
    assert {one.id for one in leader.store.all(INCIDENTS)} == {"half", "waiting"}


def claim_by(name: str) -> Callable[[Store], Change]:
    """What a server does with a subscriber's claim of act_1."""

    def work(store: Store) -> Change:
        asked_for = store.get(ACTIONS, "act_1")
        assert asked_for is not None
        return Change(actions=(claimed_action(asked_for, ActionClaim("accepted", claim=name), name, 1.0),))

    return work


def test_of_two_servers_that_are_asked_for_one_action_only_one_grants_it(both: tuple[Server, Server]) -> None:
    before, after = both
    before.store.commit(Change(actions=(action(state="requested"),)))
    granting = Stopped(before, claim_by("first"))
    after.take_over()
    after.store.update(claim_by("second"))
    granting.wake()
    assert granting.error is not None
    with pytest.raises(IllegalTransition, match="claimed by second"):
        after.store.update(claim_by("first"))


def test_of_two_subscribers_that_claim_at_once_one_gets_the_action(both: tuple[Server, Server]) -> None:
    leader, _ = both
    leader.store.commit(Change(actions=(action(state="requested"),)))
    barrier, refused = threading.Barrier(2), []

    def claim(name: str) -> None:
        barrier.wait(WITHIN_S)
        try:
            leader.store.update(claim_by(name))
        except IllegalTransition as error:
            refused.append(error)

    threads = [threading.Thread(target=claim, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN_S)
    assert len(refused) == 1


def test_a_hand_over_is_taken_at_once(both: tuple[Server, Server]) -> None:
    before, after = both
    before.leadership.hand_over()
    before.leadership.step()
    after.leadership.step()
    assert after.leadership.epoch_to_decide() == 2


def test_a_leader_whose_session_is_ended_writes_on_with_another(
    both: tuple[Server, Server], postgresql: PostgresqlServer
) -> None:
    leader, _ = both
    leader.store.probe()
    (first,) = postgresql.execute("SELECT backend_pid FROM lease", leader.name)
    postgresql.execute(f"SELECT pg_terminate_backend({first[0]}, 5000)")
    leader.store.commit(Change(incidents=(incident(),)))
    (second,) = postgresql.execute("SELECT backend_pid FROM lease", leader.name)
    assert second[0] not in (0, first[0])


def test_while_the_database_is_away_nothing_is_decided_and_afterwards_the_same_server_leads(
    both: tuple[Server, Server], postgresql: PostgresqlServer
) -> None:
    leader, standby = both
    standby.leadership.step()
    postgresql.control("stop", "--wait", "--mode=fast")
    try:
        for server in both:
            server.time_s += 60.0
            server.leadership.step()
        assert "must run and be reachable" in leader.leadership.problem()
        assert "who leads is not known" in standby.leadership.leader()
    finally:
        postgresql.control("start", "--wait")
    for server in (standby, leader):
        server.leadership.step()
    assert (leader.leadership.epoch_to_decide(), standby.leadership.leads) == (1, False)
    leader.store.commit(Change(incidents=(incident(),)))


def test_records_are_not_copied_to_where_a_server_leads(both: tuple[Server, Server], tmp_path: Path) -> None:
    leader, _ = both
    leader.store.probe()
    open_file(tmp_path / "records.db").close()
    target = PostgresqlDatabase(RecordsSettings(leader.database), alone=True)
    with pytest.raises(StoreUnavailable, match="records are copied while no server uses them"):
        records_command.copy_records(SqliteFile(tmp_path / "records.db"), target)
