"""What the loop reads of the store: the same as if it read everything at every tick, whoever changed it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.server.model.records import AuditEntry, EvidenceRequest, Node
from eagle_eye.server.store.open_records import CHANGES_MAX, OpenRecords
from eagle_eye.server.store.sql_store import SqlStore, open_file
from eagle_eye.server.store.store import Change
from tests.server.engine.situations import NOW_S, incident, past

SINCE_S = NOW_S - 3_600


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    made = open_file(tmp_path / "records.db")
    yield made
    made.close()


def evidence(**changes: Any) -> EvidenceRequest:
    fields: dict[str, Any] = {
        "id": "ev",
        "incident_id": "inc",
        "node": "n1",
        "job": "j",
        "attempt": 1,
        "kind": "evidence",
        "state": "asked",
        "within_seconds": 3.0,
        "asked_by": "server",
        "created_s": NOW_S,
        "updated_s": NOW_S,
        "expires_s": NOW_S + 600,
    }
    return EvidenceRequest(**{**fields, **changes})


def refreshed(records: OpenRecords) -> OpenRecords:
    records.refresh(SINCE_S)
    return records


def test_an_incident_that_somebody_opens_changes_and_closes_is_followed(store: SqlStore) -> None:
    records = refreshed(OpenRecords(store))
    assert not records.concern("j")
    store.commit(Change(incidents=(incident(),)))
    assert refreshed(records).incidents_of("j") == [incident()]
    store.commit(Change(incidents=(incident(state="acting"),)))
    assert [one.state for one in refreshed(records).incidents_of("j")] == ["acting"]
    store.commit(Change(incidents=(incident(state="closed"),)))
    assert refreshed(records).incidents_of("j") == []
    assert not records.concern("j")


def test_a_claim_called_false_is_remembered_until_it_is_none(store: SqlStore) -> None:
    records = refreshed(OpenRecords(store))
    assert records.dismissed_of("j") == []
    store.commit(Change(incidents=(incident(state="false"), incident(id="of-another", job="k", state="false"))))
    assert [one.id for one in refreshed(records).dismissed_of("j")] == ["inc"]
    store.commit(Change(incidents=(incident(state="closed"),)))
    assert refreshed(records).dismissed_of("j") == []


def test_actions_count_while_they_are_in_the_window_or_their_incident_is_open(store: SqlStore) -> None:
    old, new = past(id="old", incident_id="inc", created_s=SINCE_S - 10), past(id="new", incident_id="other")
    opened = incident(detected_s=SINCE_S - 20)
    store.commit(Change(incidents=(opened,), actions=(old, new)))
    records = refreshed(OpenRecords(store))
    assert [one.id for one in records.actions([opened], SINCE_S)] == ["new", "old"]
    assert [one.id for one in records.actions([], SINCE_S)] == ["new"]
    store.commit(Change(incidents=(incident(state="closed"),)))
    records.refresh(NOW_S)
    assert records.actions([opened], NOW_S) == []


def test_an_action_that_nobody_took_up_concerns_its_job_without_an_open_incident(store: SqlStore) -> None:
    store.commit(Change(actions=(past(state="requested"),)))
    records = refreshed(OpenRecords(store))
    assert records.concern("j")
    store.commit(Change(actions=(past(state="done"),)))
    assert not refreshed(records).concern("j")


def test_a_node_is_read_again_when_somebody_changed_it(store: SqlStore) -> None:
    records = refreshed(OpenRecords(store))
    assert records.nodes(["n1"]) == []
    store.commit(Change(nodes=(Node(node="n1", state="excluded", reason="", updated_s=NOW_S),)))
    assert [one.state for one in refreshed(records).nodes(["n1", "n2"])] == ["excluded"]


def test_evidence_is_read_for_incidents_that_nothing_was_asked_for_yet(store: SqlStore) -> None:
    decided = incident(id="decided", job="k")
    asked = past(incident_id="decided", state="would_act")
    store.commit(Change(incidents=(incident(), decided), actions=(asked,), evidence=(evidence(),)))
    store.commit(Change(evidence=(evidence(id="ev-2", incident_id="decided", job="k"),)))
    records = refreshed(OpenRecords(store))
    assert [one.id for one in records.evidence_of([incident(), decided])] == ["ev"]
    store.commit(Change(evidence=(evidence(state="received"),)))  # which no log of changes tells
    assert [one.state for one in refreshed(records).evidence_of([incident()])] == ["received"]


def test_more_changes_than_are_followed_one_by_one_are_seen_all_the_same(store: SqlStore) -> None:
    records = refreshed(OpenRecords(store))
    nodes = [Node(node=f"n{i}", state="in_service", reason="", updated_s=NOW_S) for i in range(CHANGES_MAX + 1)]
    store.commit(Change(nodes=tuple(nodes), incidents=(incident(),)))
    assert refreshed(records).concern("j")


def test_what_was_noted_and_never_committed_is_gone_once_forgotten(store: SqlStore) -> None:
    records = refreshed(OpenRecords(store))
    records.apply_change(Change(incidents=(incident(),), actions=(past(),)))
    assert records.concern("j")
    records.forget()
    assert not refreshed(records).concern("j")


def test_a_tick_without_changes_reads_no_record(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.commit(
        Change(incidents=(incident(),), audit=(AuditEntry(time_s=NOW_S, who="x", verb="open", subject="inc"),))
    )
    records = refreshed(OpenRecords(store))
    for name in ("open_incidents", "actions_since", "get", "page"):
        monkeypatch.setattr(store, name, lambda *_: pytest.fail("the store was read"))
    assert refreshed(records).incidents_of("j") == [incident()]
