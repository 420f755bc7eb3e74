"""Jobs that leave a cell: by hand, as it is drained, and where it has far more than its share."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_eye.server.model.records import CellStatus, JobCell
from eagle_eye.server.monitor.cells import REST_S, balanced, drained, moved, why_held
from eagle_eye.server.store.sql_store import SqlStore, open_file
from eagle_eye.server.store.store import CELLS, INCIDENTS, JOB_CELLS, Change
from tests.server.builders import NOW, action, incident

ALL = ("default", "b", "c")


def cell(name: str, *, is_drained: bool = False) -> CellStatus:
    url = f"http://{name}"
    return CellStatus(cell=name, url=url, epoch=1, nodes=0, jobs=0, problem="", updated_s=NOW, drained=is_drained)


def job(name: str, of: str, nodes: int = 100, since_s: float = NOW - 2 * REST_S, by: str = "server") -> JobCell:
    return JobCell(job=name, cell=of, nodes=nodes, since_s=since_s, by=by)


@pytest.fixture
def store(tmp_path: Path) -> SqlStore:
    made = open_file(tmp_path / "records.db")
    made.commit(Change(cells=tuple(cell(name) for name in ALL)))
    return made


def cells_of(store: SqlStore) -> dict[str, str]:
    return {one.job: one.cell for one in store.all(JOB_CELLS)}


def test_a_job_that_no_record_gives_to_a_cell_leaves_the_default_one(store: SqlStore) -> None:
    store.update(lambda inner: moved(inner, "j", "b", "anna", NOW))
    assert cells_of(store) == {"j": "b"}
    assert [(one.verb, one.who, one.detail) for one in store.audit().items] == [("move", "anna", "cell default to b")]


def test_a_job_that_is_there_already_is_not_moved(store: SqlStore) -> None:
    assert moved(store, "j", "default", "anna", NOW).empty


@pytest.mark.parametrize("state", ["suspected", "confirmed", "acting"])
def test_an_incident_that_goes_on_holds_its_job(store: SqlStore, state: str) -> None:
    store.commit(Change(incidents=(incident(state=state, job="j"),)))
    assert why_held(store, "j") == f"incident inc_1 is {state}"
    assert why_held(store, "other") == ""


def test_an_incident_that_has_recovered_holds_nothing(store: SqlStore) -> None:
    store.commit(Change(incidents=(incident(state="recovered", job="j"),)))
    assert why_held(store, "j") == ""


def test_an_action_under_way_holds_its_job(store: SqlStore) -> None:
    store.commit(Change(actions=(action(state="running", job="j"),)))
    assert why_held(store, "j") == "action act_1 is running"


def test_a_drained_cell_gives_its_jobs_to_the_others_in_equal_parts_and_keeps_those_that_are_held(
    store: SqlStore,
) -> None:
    store.commit(Change(job_cells=tuple(job(f"j{number}", "b") for number in range(5))))
    store.commit(Change(incidents=(incident(state="confirmed", job="j3"),)))
    stays: list[str] = []

    def drain(inner: object) -> Change:
        change, stays[:] = drained(store, "b", ALL, "anna", NOW)
        return change

    store.update(drain)
    assert stays == ["j3"]
    found = cells_of(store)
    assert found.pop("j3") == "b"
    assert sorted(found.values()) == ["c", "c", "default", "default"]
    assert [one.cell for one in store.all(CELLS) if one.drained] == ["b"]


def test_without_another_cell_a_drained_one_keeps_its_jobs(store: SqlStore) -> None:
    store.commit(Change(job_cells=(job("j", "b"),)))
    change, stays = drained(store, "b", ("b",), "anna", NOW)
    assert (change.job_cells, stays) == ((), ["j"])


def test_one_job_moves_where_a_cell_has_far_more_than_its_share(store: SqlStore) -> None:
    store.commit(Change(job_cells=tuple(job(f"j{number}", "b") for number in range(6))))
    store.update(lambda inner: balanced(inner, ALL, NOW))
    assert sorted(cells_of(store).values()) == ["b"] * 5 + ["c"]


def test_the_next_one_waits_until_the_nodes_of_the_first_have_settled(store: SqlStore) -> None:
    store.commit(Change(job_cells=tuple(job(f"j{number}", "b") for number in range(6))))
    store.update(lambda inner: balanced(inner, ALL, NOW))
    assert balanced(store, ALL, NOW + REST_S - 1.0).empty
    assert not balanced(store, ALL, NOW + REST_S + 1.0).empty


def test_balance_leaves_jobs_with_something_open_alone(store: SqlStore) -> None:
    store.commit(Change(job_cells=tuple(job(f"j{number}", "b") for number in range(3))))
    open_ones = tuple(incident(f"inc_{number}", state="confirmed", job=f"j{number}") for number in range(3))
    store.commit(Change(incidents=open_ones))
    assert balanced(store, ALL, NOW).empty
    assert len(store.all(INCIDENTS)) == 3


def test_balance_gives_nothing_to_cells_that_are_drained_or_have_no_leader(store: SqlStore) -> None:
    store.commit(Change(cells=(cell("c", is_drained=True),)))
    store.commit(Change(job_cells=tuple(job(f"j{number}", "b") for number in range(6))))
    assert balanced(store, ("b", "c"), NOW).empty
