from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from eagle_eye.server.model.errors import BadCursor, StoreUnavailable
from eagle_eye.server.model.records import AuditEntry, Job, Node, OutboundEvent
from eagle_eye.server.store import database
from eagle_eye.server.store.sqlite_store import SqliteStore
from eagle_eye.server.store.store import ACTIONS, DELIVERIES, EVENTS, INCIDENTS, JOBS, NODES, Change, Store
from tests.server.builders import NOW, action, event, incident, subscription


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    made = SqliteStore(tmp_path / "records.db")
    yield made
    made.close()


def test_a_record_reads_back_as_it_was_written(store: SqliteStore) -> None:
    store.commit(Change(incidents=(incident(),), actions=(action(),)))
    assert store.get(INCIDENTS, "inc_1") == incident()
    assert store.get(ACTIONS, "act_1") == action()
    assert store.get(INCIDENTS, "inc_2") is None


def test_records_survive_the_process(tmp_path: Path) -> None:
    first = SqliteStore(tmp_path / "records.db")
    first.commit(Change(incidents=(incident(),)))
    first.close()
    second = SqliteStore(tmp_path / "records.db")
    assert second.open_incidents() == [incident()]
    second.close()


ANOTHER_PROCESS = """
import sys
from pathlib import Path
from eagle_eye.server.store.sqlite_store import SqliteStore
from eagle_eye.server.store.store import INCIDENTS, Change
from tests.server.builders import incident
store = SqliteStore(Path(sys.argv[1]))
store.commit(Change(incidents=(incident(id=sys.argv[2]),)))
print(*sorted(one.id for one in store.open_incidents()))
store.close()
"""


def test_a_process_that_opens_the_file_and_leaves_takes_nothing_with_it(tmp_path: Path, store: SqliteStore) -> None:
    def another(incident_id: str) -> str:
        command = [sys.executable, "-c", ANOTHER_PROCESS, str(tmp_path / "records.db"), incident_id]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert another("inc_a").split() == ["inc_a"]
    assert [one.id for one in store.open_incidents()] == ["inc_a"]
    store.commit(Change(incidents=(incident(id="inc_b"),)))
    assert another("inc_c").split() == ["inc_a", "inc_b", "inc_c"]
    assert sorted(one.id for one in store.open_incidents()) == ["inc_a", "inc_b", "inc_c"]


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "records.db").close()
    assert stat.S_IMODE((tmp_path / "records.db").stat().st_mode) == 0o600


def test_a_change_is_written_whole_or_not_at_all(store: SqliteStore) -> None:
    broken = replace(event(), data={"bad": object()})
    with pytest.raises(TypeError):
        store.commit(Change(incidents=(incident(),), actions=(action(),), events=(broken,)))
    assert store.get(INCIDENTS, "inc_1") is None
    assert store.get(ACTIONS, "act_1") is None
    assert store.change_range() == (0, 0)


def test_an_event_and_its_deliveries_are_one_transaction(store: SqliteStore) -> None:
    store.commit(
        Change(
            subscriptions=(
                subscription("sub-all"),
                subscription("sub-type", types=["eagle_eye.node.readmitted"]),
                subscription("sub-job", jobs=["other"]),
                subscription("sub-ended", active=False),
            )
        )
    )
    store.commit(Change(incidents=(incident(),), events=(event(),)))
    deliveries = store.page(DELIVERIES, {}).items
    assert [delivery.subscription_id for delivery in deliveries] == ["sub-all"]
    assert deliveries[0].state == "pending"
    assert deliveries[0].group == "inc_1"
    stored = store.get(EVENTS, "evt-1")
    assert stored is not None
    assert stored.sequence == deliveries[0].sequence > 0


def test_the_same_event_twice_is_announced_once(store: SqliteStore) -> None:
    store.commit(Change(subscriptions=(subscription(),)))
    store.commit(Change(events=(event(),)))
    store.commit(Change(events=(event(),)))
    assert len(store.page(DELIVERIES, {}).items) == 1


def test_heartbeats_go_only_to_those_who_name_them(store: SqliteStore) -> None:
    heartbeat = OutboundEvent(
        id="hb", type="eagle_eye.heartbeat", subject="", job="", time_s=NOW, group="", data={}, expires_s=NOW + 60
    )
    store.commit(Change(subscriptions=(subscription("a"), subscription("b", types=["eagle_eye.heartbeat"]))))
    store.commit(Change(events=(heartbeat,)))
    assert [delivery.subscription_id for delivery in store.page(DELIVERIES, {}).items] == ["b"]


def test_pages_follow_each_other_without_gap_or_repeat(store: SqliteStore) -> None:
    store.commit(Change(incidents=tuple(incident(f"inc_{number}") for number in range(25))))
    seen: list[str] = []
    cursor: str | None = None
    while True:
        page = store.page(INCIDENTS, {}, cursor, 10)
        seen += [found.id for found in page.items]
        # What changes meanwhile keeps its place.
        store.commit(Change(incidents=(incident("inc_3", summary="new"),)))
        cursor = page.next
        if cursor is None:
            break
    assert seen == [f"inc_{number}" for number in reversed(range(25))]


@pytest.mark.parametrize(
    "cursor", ["x", "", "AAAA", "aW5jaWRlbnRzOi0x", "\u00e4", "aW5jaWRlbnRzOjk5OTk5OTk5OTk5OTk5OTk5OTk5OQ"]
)
def test_a_foreign_cursor_is_refused(store: SqliteStore, cursor: str) -> None:
    with pytest.raises(BadCursor):
        store.page(INCIDENTS, {}, cursor)


def test_a_cursor_of_another_list_is_refused(store: SqliteStore) -> None:
    store.commit(Change(incidents=(incident("a"), incident("b"))))
    cursor = store.page(INCIDENTS, {}, None, 1).next
    with pytest.raises(BadCursor):
        store.page(ACTIONS, {}, cursor)


def test_lists_filter_by_columns_and_by_members(store: SqliteStore) -> None:
    store.commit(
        Change(incidents=(incident("a", nodes=["n1", "n2"]), incident("b", nodes=["n3"], state="closed", job="other")))
    )
    assert [i.id for i in store.page(INCIDENTS, {"node": "n2"}).items] == ["a"]
    assert [i.id for i in store.page(INCIDENTS, {"state": "closed"}).items] == ["b"]
    assert [i.id for i in store.page(INCIDENTS, {"job": "other", "node": "n1"}).items] == []
    with pytest.raises(KeyError, match="cannot be filtered by summary"):
        store.page(INCIDENTS, {"summary": "x"})


def test_open_incidents_and_newer_actions_leave_out_the_others(store: SqliteStore) -> None:
    states = ("suspected", "confirmed", "acting", "recovered", "closed", "false")
    store.commit(Change(incidents=tuple(incident(state, state=state) for state in states)))
    assert [i.id for i in store.open_incidents()] == ["suspected", "confirmed", "acting", "recovered"]
    store.commit(Change(actions=(action("a", "done"), action("b", "running", created_s=NOW + 5))))
    assert [a.id for a in store.actions_since(NOW + 1)] == ["b"]
    assert [a.id for a in store.actions_of("inc_1")] == ["a", "b"]


def test_update_loses_no_change_of_another_thread(store: SqliteStore) -> None:
    store.commit(Change(jobs=(Job(job="j", attempt=0, state="running", ranks=[], restart_owner="", updated_s=NOW),)))

    def count_up() -> None:
        for _ in range(25):

            def work(inner: Store) -> Change:
                job = inner.get(JOBS, "j")
                assert job is not None
                return Change(jobs=(replace(job, attempt=job.attempt + 1),))

            store.update(work)

    threads = [threading.Thread(target=count_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    job = store.get(JOBS, "j")
    assert job is not None
    assert job.attempt == 100


def test_changes_are_told_in_order_and_after_the_commit(store: SqliteStore) -> None:
    reported: list[int] = []
    store.listen(lambda: reported.append(store.change_range()[1]))
    store.commit(Change(nodes=(Node(node="n1", state="in_service", reason="", updated_s=NOW),)))
    store.commit(Change(incidents=(incident(),)))
    assert reported == [1, 2]
    assert [(change.kind, change.key) for change in store.changes_since(0, 10)] == [
        (NODES.name, "n1"),
        (INCIDENTS.name, "inc_1"),
    ]
    assert store.changes_since(2, 10) == []


def test_the_audit_trail_cannot_be_changed(tmp_path: Path, store: SqliteStore) -> None:
    store.commit(Change(audit=(AuditEntry(time_s=NOW, who="local", verb="exclude", subject="n1"),)))
    other = sqlite3.connect(tmp_path / "records.db")
    for statement in ("DELETE FROM audit", "UPDATE audit SET record = ''"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            other.execute(statement)
    other.close()
    assert [entry.subject for entry in store.audit().items] == ["n1"]


def test_a_newer_servers_file_is_refused(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "records.db").close()
    connection = sqlite3.connect(tmp_path / "records.db")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreUnavailable, match="version 99"):
        SqliteStore(tmp_path / "records.db")


def test_a_file_that_is_no_database_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "records.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreUnavailable, match=r"put a backup.s in its place \(eagle-eye backup restore\)"):
        SqliteStore(tmp_path / "records.db")


def test_half_a_database_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    SqliteStore(path).close()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(StoreUnavailable, match=r"records.db cannot be .*put a backup's in its place"):
        SqliteStore(path)


def test_a_folder_that_cannot_be_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    with pytest.raises(StoreUnavailable, match="data_dir must be a folder"):
        SqliteStore(tmp_path / "data" / "records.db")


def test_commits_are_durable_by_configuration(tmp_path: Path) -> None:
    connection = database.connect(tmp_path / "any.db")
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_the_log_that_a_large_transaction_made_long_is_short_again(tmp_path: Path) -> None:
    connection, log = database.connect(tmp_path / "any.db"), tmp_path / "any.db-wal"
    connection.execute("CREATE TABLE t (one BLOB)")
    usual_bytes = 1_000 * 4_096

    def commit(size: int, times: int) -> None:
        for _ in range(times):
            with database.transaction(connection):
                connection.execute("INSERT INTO t VALUES (randomblob(?))", (size,))

    commit(4 * usual_bytes, 1)
    assert log.stat().st_size > 4 * usual_bytes
    commit(4_096, 10)
    assert log.stat().st_size <= usual_bytes
    connection.close()


def test_prune_forgets_settled_events_and_keeps_pending_ones(store: SqliteStore) -> None:
    store.commit(Change(subscriptions=(subscription(),)))
    store.commit(Change(events=(event("old"), event("pending"))))
    (delivery,) = [d for d in store.page(DELIVERIES, {}).items if d.event_id == "old"]
    store.commit(Change(deliveries=(replace(delivery, state="delivered"),)))
    assert store.prune(NOW + 100, retention_s=50) == 1
    assert store.get(EVENTS, "old") is None
    assert store.get(EVENTS, "pending") is not None
    assert [d.event_id for d in store.page(DELIVERIES, {}).items] == ["pending"]


def test_jobs_that_ended_long_ago_are_deleted(store: SqliteStore) -> None:
    def job(name: str, state: str, updated_s: float) -> Job:
        return Job(job=name, attempt=0, state=state, ranks=[], restart_owner="", updated_s=updated_s)

    old = NOW - 100.0
    store.commit(Change(jobs=(job("old", "finished", old), job("lives", "running", old), job("new", "failed", NOW))))
    store.prune(NOW, retention_s=50.0)
    assert [record.job for record in store.all(JOBS)] == ["lives", "new"]
