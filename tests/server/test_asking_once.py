"""What was opened or asked for is not opened or asked for again under another name, whatever is lost on the way."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text

from eagle_eye.schema.action import ACTION_REQUESTED, INCIDENT_OPENED, Report
from eagle_eye.server.admin import records_command
from eagle_eye.server.engine import ledger
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.records import ActionState, OpenedIncident, WantedAction
from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.store.sql_store import SqliteFile, SqlStore, open_file, open_records
from eagle_eye.server.store.store import ACTIONS, EVENTS, INCIDENTS, Change
from tests.server.builders import action, incident
from tests.server.cutting_relay import Cut, cutting_relay
from tests.server.postgresql_server import PASSWORD, Opens, PostgresqlServer
from tests.server.test_store_races import Watched

POLICY = PolicySettings(mode="act", verdict_gone_s=10, retry_s=5.0, tries_max=2)
REQUEST = WantedAction("job", 0, "exclude_node", ("n1",))
ENDED: tuple[ActionState, ...] = ("done", "failed", "refused", "rejected", "expired", "withdrawn", "would_act")


def lose_what_was_decided(store: SqlStore) -> None:
    """Have the records as they were before anything was decided: the commit was lost with the database's host."""
    with store._writes.begin() as connection:  # no other way leads there: records are never deleted
        for table in ("deliveries", "events", "actions", "incidents", "changes"):
            connection.execute(text(f"DELETE FROM {table}"))


def test_who_judges_the_same_after_the_commit_was_lost_opens_and_asks_for_the_same(
    store: SqlStore, opens: Opens
) -> None:
    before = Watched(store, POLICY)
    before.judge()
    (lost,) = store.all(ACTIONS)
    announced = [one.id for one in store.all(EVENTS) if one.type == INCIDENT_OPENED]
    lose_what_was_decided(store)
    with closing(opens()) as found:
        after = Watched(found, POLICY)
        after.judge()
        (asked,) = found.all(ACTIONS)
        (opened,) = found.all(INCIDENTS)
        assert [one.id for one in found.all(EVENTS) if one.type == INCIDENT_OPENED] == announced
    assert (asked.id, asked.exclude) == (lost.id, lost.exclude) == (lost.id, ["j-n1"])
    assert opened.id == lost.incident_id


def test_trouble_that_comes_anew_after_it_was_over_is_another_incident(store: SqlStore) -> None:
    what = OpenedIncident("job", 0, "stop")
    first = store.new_id(what)
    store.commit(Change(incidents=(incident(first, state="closed"),)))
    assert store.new_id(what) not in (first, store.new_id(what, [store.new_id(what)]))


@pytest.mark.parametrize("state", ENDED)
def test_asked_again_after_it_ended_it_is_another_action(store: SqlStore, state: ActionState) -> None:
    first = store.new_id(REQUEST)
    store.commit(Change(actions=(action(first, state=state),)))
    assert store.new_id(REQUEST) != first
    assert store.new_id(REQUEST) == store.new_id(REQUEST)


def test_two_of_the_same_that_are_asked_for_at_once_are_two_actions(store: SqlStore) -> None:
    first = store.new_id(REQUEST)
    assert store.new_id(REQUEST, [first]) != first


def test_what_failed_is_tried_again_as_another_action(store: SqlStore) -> None:
    site = Watched(store, POLICY)
    site.judge()
    (first,) = store.all(ACTIONS)
    failed = ledger.report_action(first, Report("failed", "no reason"), "subscriber", site.clock.now_s())
    store.commit(Change(actions=(failed,)))
    site.judge()
    assert [(one.id == first.id, one.state) for one in store.all(ACTIONS)] == [(True, "failed"), (False, "requested")]


def test_copied_records_make_the_ids_that_they_made_before(tmp_path: Path) -> None:
    with closing(open_file(tmp_path / "from.db")) as source:
        expected = source.new_id(REQUEST)
    records_command.copy_records(SqliteFile(tmp_path / "from.db"), SqliteFile(tmp_path / "to.db"))
    with closing(open_file(tmp_path / "to.db")) as target:
        assert target.new_id(REQUEST) == expected


@pytest.fixture
def password_file(tmp_path: Path) -> str:
    path = tmp_path / "password"
    path.write_text(PASSWORD, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("lost", ["the commit", "its answer"])
def test_a_leader_that_does_not_learn_whether_it_has_committed_asks_for_one_action(
    postgresql: PostgresqlServer, password_file: str, lost: Cut
) -> None:
    with cutting_relay(postgresql.port) as relay:
        url = postgresql.new_database_over_tcp("&sslmode=disable", relay.port)
        with closing(open_records(RecordsSettings(url, password_file), Path("/-"))) as store:
            site = Watched(store, POLICY)
            first = store.new_id(WantedAction("j", 0, "exclude_node", ("j-n1",)))
            relay.loses = lost
            with pytest.raises(StoreUnavailable):
                site.judge()
            assert relay.loses == ""
            site.judge()
            assert [one.id for one in store.all(ACTIONS)] == [first]
            requested = [one for one in store.all(EVENTS) if one.type == ACTION_REQUESTED]
            assert [one.subject for one in requested] == [first]
