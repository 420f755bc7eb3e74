"""Whatever is written in whatever order: each record is its last version, at its first place, on each engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_eye.server.model.records import Incident
from eagle_eye.server.store.sql_store import SqlStore
from eagle_eye.server.store.store import INCIDENTS, Change
from tests.server.builders import incident
from tests.server.postgresql_server import Opens

# What PostgreSQL cannot store is replaced, and has a test of its own.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
KEYS = st.sampled_from(["a", "A", "ä", "%", "a'", 'b"', "\\u0000", "z "])
RECORDS = st.builds(
    lambda key, job, nodes, summary, confidence, time_s: incident(
        key, job=job, nodes=nodes, summary=summary, confidence=confidence, detected_s=time_s, updated_s=time_s
    ),
    KEYS,
    st.sampled_from(["j", "J", "%"]) | TEXT,
    st.lists(st.sampled_from(["n1", "N1", "n'1", "%"]), max_size=3),
    TEXT,
    NUMBER,
    NUMBER,
)


def emptied(store: SqlStore) -> SqlStore:
    """Return the records without incidents."""
    with store._writing() as cursor:
        cursor.execute("DELETE FROM incidents")
    return store


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.lists(RECORDS, min_size=1, max_size=6), max_size=5))
def test_pages_are_what_a_table_of_records_would_be(store: SqlStore, changes: list[list[Incident]]) -> None:
    emptied(store)
    model: dict[str, Incident] = {}
    for records in changes:
        store.commit(Change(incidents=tuple(records)))
        model.update((record.id, record) for record in records)
    wanted = list(reversed(model.values()))
    seen: list[Incident] = []
    cursor: str | None = None
    while True:
        page = store.page(INCIDENTS, {}, cursor, 2)
        seen += page.items
        cursor = page.next
        if cursor is None:
            break
    assert seen == wanted
    assert store.all(INCIDENTS) == list(model.values())
    assert store.count(INCIDENTS) == len(model)
    for name in ("n1", "%"):
        assert store.page(INCIDENTS, {"node": name}).items == [one for one in wanted if name in one.nodes]
    for job in ("J", "%"):
        assert store.page(INCIDENTS, {"job": job}).items == [one for one in wanted if one.job == job]
    assert store.page(INCIDENTS, {}, since_s=0.0).items == [one for one in wanted if one.detected_s >= 0.0]
    assert store.missing(INCIDENTS, ["a", "nobody"]) == [key for key in ("a", "nobody") if key not in model]


@pytest.mark.parametrize("text", ["\0", "a\0\\u0000", "\\\\u0000\0"])
def test_what_is_not_nul_stays(opens: Opens, tmp_path: Path, text: str) -> None:
    records = opens()
    records.commit(Change(incidents=(incident(summary=text),)))
    (found,) = records.all(INCIDENTS)
    records.close()
    assert found.summary.replace("\ufffd", "\0") == text
