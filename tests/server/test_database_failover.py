"""A database that fails over to a replica which lacks the last commits: no epoch is given out twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from eagle_eye.demo.two_servers import postgresql_programs
from eagle_eye.server.model.records import WantedAction
from eagle_eye.server.store.leadership import LEAP
from eagle_eye.server.store.postgresql import PostgresqlDatabase, PostgresqlLease
from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.store.sql_store import leadership_of, open_records
from eagle_eye.server.store.store import ACTIONS, Change
from tests.server.builders import action
from tests.server.own_process import wait_until
from tests.server.postgresql_server import USER, PostgresqlServer, as_replica, replica_of, serving
from tests.server.test_leading_on_postgresql import Server

LOST_EPOCH = 2
REQUEST = WantedAction("job", 0, "exclude_node", ("n1",))


@dataclass
class FailedOver:
    """A site whose database has failed over: what ``lost`` did last is lost, ``kept`` led before it."""

    url: str
    kept: Server
    lost: Server
    action_id: str


@pytest.fixture
def failed_over() -> Iterator[FailedOver]:
    bin_ = postgresql_programs()
    if bin_ is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql-15)")
    with serving(bin_) as primary:
        name = primary.new_database().partition("@/")[2].partition("?")[0]
        with replica_of(primary) as replica, ExitStack() as servers:
            places = f"host={primary.folder},{replica.folder}&port={primary.port},{replica.port}"
            url = f"postgresql+psycopg://{USER}@/{name}?{places}&target_session_attrs=read-write"
            kept = servers.enter_context(closing(Server("http://a", url)))
            lost = servers.enter_context(closing(Server("http://b", url)))
            ((written,),) = primary.execute("SELECT pg_current_wal_lsn()")
            wait_until(lambda: replica.execute(f"SELECT pg_last_wal_replay_lsn() >= '{written}'") == [(True,)])
            assert replica.execute("SELECT epoch FROM lease", name) == [(1,)]
            replica.execute("ALTER SYSTEM SET primary_conninfo = ''")
            replica.control("reload")
            wait_until(lambda: replica.execute("SELECT 1 FROM pg_stat_wal_receiver") == [])
            lost.take_over()
            assert lost.leadership.epoch_to_decide() == LOST_EPOCH
            action_id = lost.store.new_id(REQUEST)
            lost.store.commit(Change(actions=(action(action_id),)))
            primary.control("stop", "--mode=immediate")
            replica.control("promote", "--wait")
            yield FailedOver(url, kept, lost, action_id)


def step_until(server: Server, claim: Callable[[], bool]) -> None:
    def held() -> bool:
        server.leadership.step()
        return claim()

    wait_until(held)


def test_the_leader_whose_successor_is_lost_leads_on_above_the_successors_epoch(failed_over: FailedOver) -> None:
    kept = failed_over.kept
    step_until(kept, lambda: not kept.leadership.lease_problem)
    assert kept.leadership.epoch_to_decide() == 2 + LEAP > LOST_EPOCH
    kept.store.probe()


def test_who_takes_over_leads_above_the_lost_epoch_and_asks_for_what_was_lost_under_the_same_id(
    failed_over: FailedOver,
) -> None:
    lost = failed_over.lost
    step_until(lost, lambda: not lost.leadership.leads)  # the row is another's by now
    lost.leadership.stand_by()
    lost.take_over()
    assert lost.leadership.epoch_to_decide() > LOST_EPOCH
    assert lost.store.all(ACTIONS) == []
    assert lost.store.new_id(REQUEST) == failed_over.action_id


def test_replicas_count_as_behind_until_commits_wait_for_them(postgresql: PostgresqlServer) -> None:
    keeper = PostgresqlLease(PostgresqlDatabase(RecordsSettings(postgresql.new_database()), alone=False))
    assert keeper.replicas_behind() == 0
    with replica_of(postgresql):
        wait_until(lambda: keeper.replicas_behind() == 1)
        postgresql.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        postgresql.control("reload")
        wait_until(lambda: keeper.replicas_behind() == 0)
        postgresql.execute("ALTER SYSTEM RESET synchronous_standby_names")
        postgresql.control("reload")
    keeper.close()


def test_an_epoch_rises_by_one_while_the_database_does_not_fail_over(postgresql: PostgresqlServer) -> None:
    settings = RecordsSettings(postgresql.new_database(), lease_s=1.0)
    for epoch in (1, 2):
        leadership = leadership_of(settings, "http://a")
        leadership.step()
        leadership.step()
        assert leadership.epoch_to_decide() == epoch
        leadership.hand_over()
        leadership.step()
        leadership.close()


@pytest.mark.parametrize(("timeline", "epoch"), [(0, 8), (1, 8), (9, 8)], ids=["not known", "the same", "a later one"])
def test_an_epoch_that_is_there_already_rises_whatever_timeline_it_is_from(
    postgresql: PostgresqlServer, timeline: int, epoch: int
) -> None:
    """As where earlier servers wrote it, and where a dump is restored into a database that has not failed over."""
    url = postgresql.new_database()
    open_records(RecordsSettings(url), Path("/-")).close()
    name = url.partition("@/")[2].partition("?")[0]
    postgresql.execute(f"UPDATE lease SET epoch = 7, timeline = {timeline}", name)
    leadership = leadership_of(RecordsSettings(url), "http://a")
    leadership.step()
    assert leadership.epoch_to_decide() == epoch
    leadership.close()


def test_a_database_that_does_not_say_its_timeline_is_led_all_the_same_and_it_is_said_once(
    postgresql: PostgresqlServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = postgresql.new_database()
    name = url.partition("@/")[2].partition("?")[0]
    postgresql.execute("CREATE ROLE tenant LOGIN")
    postgresql.execute("REVOKE EXECUTE ON FUNCTION pg_walfile_name(pg_lsn) FROM PUBLIC", name)
    postgresql.execute("GRANT ALL ON SCHEMA public TO tenant", name)
    leadership = leadership_of(RecordsSettings(url.replace(f"{USER}@", "tenant@")), "http://a")
    for _ in range(3):
        leadership.step()
    assert leadership.epoch_to_decide() == 1
    assert caplog.text.count("does not say its timeline") == 1
    leadership.close()


def test_a_database_in_recovery_is_not_led_and_says_so(postgresql: PostgresqlServer) -> None:
    url = postgresql.new_database()
    leadership = leadership_of(RecordsSettings(url), "http://a")
    with as_replica(postgresql):
        leadership.step()
    assert not leadership.leads
    assert "is read-only or in recovery (a replica): records.url must name the primary" in leadership.lease_problem
    leadership.close()
