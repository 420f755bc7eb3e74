"""What the store promises, on each engine."""

from __future__ import annotations

import math
import threading

import pytest
from msgspec.structs import replace

from eagle_eye.schema.action import MemberRank
from eagle_eye.server.model.errors import BadCursor, StoreUnavailable
from eagle_eye.server.model.records import AuditEntry, ForgottenNode, Job, LastCodes, Node, OutboundEvent
from eagle_eye.server.security import auth
from eagle_eye.server.store.sql_store import SqlStore
from eagle_eye.server.store.store import (
    ACTIONS,
    DELIVERIES,
    EVENTS,
    FORGOTTEN_NODES,
    INCIDENTS,
    JOBS,
    LAST_CODES,
    NODES,
    SILENCES,
    TOKENS,
    Backlog,
    Change,
    Store,
    Upcoming,
)
from tests.server.builders import NOW, action, event, incident, silence, subscription
from tests.server.postgresql_server import Opens


def test_a_record_reads_back_as_it_was_written(store: SqlStore) -> None:
    store.commit(Change(incidents=(incident(),), actions=(action(),)))
    assert store.get(INCIDENTS, "inc_1") == incident()
    assert store.get(ACTIONS, "act_1") == action()
    assert store.get(INCIDENTS, "inc_2") is None


def test_records_survive_the_process(opens: Opens) -> None:
    first = opens()
    first.commit(Change(incidents=(incident(),)))
    first.close()
    second = opens()
    assert second.open_incidents() == [incident()]
    second.close()


def test_a_change_is_written_whole_or_not_at_all(store: SqlStore) -> None:
    broken = replace(event(), data={"bad": object()})
    with pytest.raises(TypeError):
        store.commit(Change(incidents=(incident(),), actions=(action(),), events=(broken,)))
    assert store.get(INCIDENTS, "inc_1") is None
    assert store.get(ACTIONS, "act_1") is None
    assert store.change_range() == (0, 0)


def test_an_event_and_its_deliveries_are_one_transaction(store: SqlStore) -> None:
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


def test_the_same_event_twice_is_announced_once(store: SqlStore) -> None:
    store.commit(Change(subscriptions=(subscription(),)))
    store.commit(Change(events=(event(),)))
    store.commit(Change(events=(event(),)))
    assert len(store.page(DELIVERIES, {}).items) == 1


def test_heartbeats_go_only_to_those_who_name_them(store: SqlStore) -> None:
    heartbeat = OutboundEvent(
        id="hb", type="eagle_eye.heartbeat", subject="", job="", time_s=NOW, group="", data={}, expires_s=NOW + 60
    )
    store.commit(Change(subscriptions=(subscription("a"), subscription("b", types=["eagle_eye.heartbeat"]))))
    store.commit(Change(events=(heartbeat,)))
    assert [delivery.subscription_id for delivery in store.page(DELIVERIES, {}).items] == ["b"]


def test_pages_follow_each_other_without_gap_or_repeat(store: SqlStore) -> None:
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
def test_a_foreign_cursor_is_refused(store: SqlStore, cursor: str) -> None:
    with pytest.raises(BadCursor):
        store.page(INCIDENTS, {}, cursor)


def test_a_cursor_of_another_list_is_refused(store: SqlStore) -> None:
    store.commit(Change(incidents=(incident("a"), incident("b"))))
    cursor = store.page(INCIDENTS, {}, None, 1).next
    with pytest.raises(BadCursor):
        store.page(ACTIONS, {}, cursor)


def test_lists_filter_by_columns_and_by_members(store: SqlStore) -> None:
    store.commit(
        Change(incidents=(incident("a", nodes=["n1", "n2"]), incident("b", nodes=["n3"], state="closed", job="other")))
    )
    assert [i.id for i in store.page(INCIDENTS, {"node": "n2"}).items] == ["a"]
    assert [i.id for i in store.page(INCIDENTS, {"state": "closed"}).items] == ["b"]
    assert [i.id for i in store.page(INCIDENTS, {"job": "other", "node": "n1"}).items] == []
    with pytest.raises(KeyError, match="cannot be filtered by summary"):
        store.page(INCIDENTS, {"summary": "x"})


def test_open_incidents_and_newer_actions_leave_out_the_others(store: SqlStore) -> None:
    states = ("suspected", "confirmed", "acting", "recovered", "closed", "false")
    store.commit(Change(incidents=tuple(incident(state, state=state) for state in states)))
    assert [i.id for i in store.open_incidents()] == ["suspected", "confirmed", "acting", "recovered"]
    store.commit(Change(actions=(action("a", "done"), action("b", "running", created_s=NOW + 5))))
    assert [a.id for a in store.actions_since(NOW + 1)] == ["b"]
    assert [a.id for a in store.actions_of("inc_1")] == ["a", "b"]


def test_update_loses_no_change_of_another_thread(store: SqlStore) -> None:
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


def test_changes_are_told_in_order_and_after_the_commit(store: SqlStore) -> None:
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


def test_prune_forgets_settled_events_and_keeps_pending_ones(store: SqlStore) -> None:
    store.commit(Change(subscriptions=(subscription(),)))
    store.commit(Change(events=(event("old"), event("pending"))))
    (delivery,) = [d for d in store.page(DELIVERIES, {}).items if d.event_id == "old"]
    store.commit(Change(deliveries=(replace(delivery, state="delivered"),)))
    assert store.prune(NOW + 100, retention_s=50) == 1
    assert store.get(EVENTS, "old") is None
    assert store.get(EVENTS, "pending") is not None
    assert [d.event_id for d in store.page(DELIVERIES, {}).items] == ["pending"]


def test_jobs_that_ended_long_ago_are_deleted(store: SqlStore) -> None:
    def job(name: str, state: str, updated_s: float) -> Job:
        return Job(job=name, attempt=0, state=state, ranks=[], restart_owner="", updated_s=updated_s)

    old = NOW - 100.0
    store.commit(Change(jobs=(job("old", "finished", old), job("lives", "running", old), job("new", "failed", NOW))))
    store.prune(NOW, retention_s=50.0)
    assert [record.job for record in store.all(JOBS)] == ["lives", "new"]


def test_of_one_record_twice_in_a_change_the_last_counts(store: SqlStore) -> None:
    store.commit(Change(incidents=(incident("a", summary="first"), incident("b"), incident("a", summary="last"))))
    assert [(one.id, one.summary) for one in store.all(INCIDENTS)] == [("a", "last"), ("b", "n1 hangs")]


def test_lists_look_into_lists_of_objects(store: SqlStore) -> None:
    def job(name: str, node: str) -> Job:
        ranks = [MemberRank(rank=0, node=node, device=0)]
        return Job(job=name, attempt=0, state="running", ranks=ranks, restart_owner="", updated_s=NOW)

    store.commit(Change(jobs=(job("a", "n1"), job("b", "n2"), replace(job("c", "n3"), nodes=["n2"]))))
    assert [one.job for one in store.page(JOBS, {"node": "n2"}).items] == ["c", "b"]
    assert store.page(JOBS, {"node": "n"}).items == []


def test_a_search_finds_part_of_the_key_whatever_its_case_and_takes_no_sign_for_another(store: SqlStore) -> None:
    names = ("Train-A", "train_b", "trainXb", "eval%1")
    jobs = [Job(job=name, attempt=0, state="running", ranks=[], restart_owner="", updated_s=NOW) for name in names]
    store.commit(Change(jobs=tuple(jobs)))

    def found(search: str) -> list[str]:
        return [one.job for one in store.page(JOBS, {}, search=search).items]

    assert found("TRAIN") == ["trainXb", "train_b", "Train-A"]
    assert found("train_") == ["train_b"]
    assert found("%") == ["eval%1"]


def test_keys_differ_by_case_and_accent(store: SqlStore) -> None:
    store.commit(Change(incidents=(incident("a", job="job"), incident("b", job="JOB"), incident("c", job="jöb"))))
    assert [one.id for one in store.page(INCIDENTS, {"job": "JOB"}).items] == ["b"]
    assert [one.id for one in store.page(INCIDENTS, {"job": "jöb"}).items] == ["c"]


def test_records_since_a_time_are_those_of_their_own_time(store: SqlStore) -> None:
    store.commit(Change(incidents=(incident("old", detected_s=NOW - 10), incident("new", detected_s=NOW))))
    assert [one.id for one in store.page(INCIDENTS, {}, since_s=NOW).items] == ["new"]


def test_missing_are_the_keys_that_no_record_has(store: SqlStore) -> None:
    store.commit(Change(nodes=tuple(node(f"n{number}") for number in range(0, 1_200, 2))))
    keys = [f"n{number}" for number in range(1_200)]
    assert store.missing(NODES, keys) == keys[1::2]
    assert store.missing(NODES, []) == []


def node(name: str) -> Node:
    return Node(node=name, state="in_service", reason="", updated_s=NOW)


def test_a_forgotten_node_is_gone_with_its_last_codes(store: SqlStore) -> None:
    store.commit(Change(nodes=(node("n1"), node("n2")), last_codes=(LastCodes(node="n1"),)))
    store.commit(Change(forgotten_nodes=(ForgottenNode(node="n1", forgotten_s=NOW),)))
    assert [one.node for one in store.all(NODES)] == ["n2"]
    assert store.get(LAST_CODES, "n1") is None
    assert store.retire(FORGOTTEN_NODES, "forgotten_s", NOW + 1, 10) == 1
    assert store.count(FORGOTTEN_NODES) == 0


def test_deliveries_of_one_incident_follow_each_other_and_actions_go_first(store: SqlStore) -> None:
    store.commit(Change(subscriptions=(subscription("sub"),)))
    waiting = event("evt-a", group="inc_a"), event("evt-b", group="inc_b")
    store.commit(Change(events=(*waiting, event("evt-c", group="inc_b", type="eagle_eye.action.requested"))))
    due = store.due_deliveries("sub", NOW, 10)
    assert [(one.delivery.event_id, one.urgent) for one in due] == [("evt-b", True), ("evt-a", False)]
    assert store.upcoming(NOW) == {"sub": Upcoming(due=True, next_s=None)}
    assert store.upcoming(NOW - 5) == {"sub": Upcoming(due=False, next_s=NOW)}
    assert store.backlog() == [Backlog("sub", 3, NOW)]
    assert store.reported("sub", "inc_a")
    assert not store.reported("sub", "inc_z")


def test_deliveries_expire_and_fail_with_their_event(store: SqlStore) -> None:
    store.commit(Change(subscriptions=(subscription("sub"),)))
    store.commit(Change(events=(event("evt-1", expires_s=NOW + 5), event("evt-2"))))
    first, second = store.subscription_deliveries("sub")
    assert [one.id for one in store.expired_deliveries(NOW + 5, 10)] == [first.id]
    store.commit(Change(deliveries=(replace(first, state="failed"), replace(second, state="failed"))))
    assert [one.id for one in store.failed_deliveries("sub", NOW, NOW + 5, 10)] == [second.id]
    assert store.failed_deliveries("sub", NOW + 1, NOW, 10) == []


def test_every_change_of_a_token_is_counted(store: SqlStore) -> None:
    _, token = auth.mint("agent", "n1", NOW, None)
    assert (store.any_token(), store.marks().tokens) == (False, 0)
    store.commit(Change(tokens=(token,)))
    made = store.marks().tokens
    store.commit(Change(tokens=(replace(token, revoked=True),)))
    assert store.marks().tokens > made > 0
    assert store.token_by_sha256(token.sha256) == replace(token, revoked=True)
    assert [one.id for one in store.page(TOKENS, {"node": "n1"}).items] == [token.id]


def test_the_audit_trail_is_filtered_and_paged(store: SqlStore) -> None:
    entries = [
        AuditEntry(time_s=NOW + number, who=f"who{number % 2}", verb="exclude", subject=f"n{number}")
        for number in range(6)
    ]
    store.commit(Change(audit=tuple(entries)))
    assert store.audit(who="who1", since_s=NOW + 2).items == [entries[5], entries[3]]
    assert store.audit(subject=("n0", "n4"), verb="exclude").items == [entries[4], entries[0]]
    assert store.audit(verb="drain").items == []
    page = store.audit(limit=4)
    assert page.next is not None
    assert store.audit(page.next, limit=4) == ([entries[1], entries[0]], None)


def test_text_is_kept_whatever_is_in_it(store: SqlStore) -> None:
    text = "a\\u0000 \\\\u0000 \x01 \x7f 😀 'quoted' %s :name"
    store.commit(Change(incidents=(incident(summary=text, nodes=["n%", "n'1"]),)))
    found = store.get(INCIDENTS, "inc_1")
    assert found is not None
    assert found.summary == text
    assert [one.id for one in store.page(INCIDENTS, {"node": "n'1"}).items] == ["inc_1"]


def test_a_nul_is_kept_or_replaced_and_hides_no_other_record(store: SqlStore) -> None:
    store.commit(Change(incidents=(incident("a", summary="kernel: \0\\u0000"), incident("b"))))
    found = store.get(INCIDENTS, "a")
    assert found is not None
    assert found.summary in ("kernel: \0\\u0000", "kernel: \ufffd\\u0000")
    assert [one.id for one in store.page(INCIDENTS, {"node": "n1"}).items] == ["b", "a"]
    assert store.get(INCIDENTS, "a\0") is None


def test_a_time_without_end_is_later_than_any(store: SqlStore) -> None:
    store.commit(Change(subscriptions=(subscription("sub"),)))
    store.commit(Change(events=(event("evt-1", expires_s=math.inf),)))
    assert store.expired_deliveries(1e300, 10) == []


def test_a_probe_writes(store: SqlStore) -> None:
    store.probe()
    assert store.marks().tokens == 0
    store.note_damage("half of it is gone")
    with pytest.raises(StoreUnavailable, match="half of it is gone"):
        store.probe()


def test_another_process_is_seen_at_once(opens: Opens, store: SqlStore) -> None:
    other = opens()
    other.commit(Change(incidents=(incident(),)))
    assert store.open_incidents() == [incident()]
    assert [change.key for change in store.changes_since(0, 10)] == ["inc_1"]
    other.close()


def test_silences_are_found_by_state_and_announced_to_readers(store: SqlStore) -> None:
    store.commit(Change(silences=(silence("a"), silence("b", state="ended"))))
    assert store.page(SILENCES, {"state": "active"}).items == [silence("a")]
    assert [(one.kind, one.key) for one in store.changes_since(0, 10)] == [("silences", "a"), ("silences", "b")]


def test_silences_that_have_ended_are_deleted_with_what_is_as_old(store: SqlStore) -> None:
    over = {"state": "ended", "until_s": NOW - 100}
    store.commit(Change(silences=(silence("old", **over), silence("late", until_s=NOW - 100), silence("new"))))
    store.prune(NOW, 99.0)
    assert [one.id for one in store.all(SILENCES)] == ["late", "new"]
