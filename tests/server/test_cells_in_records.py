"""What cells share by the records, on a real PostgreSQL: each has its lease, and one transaction writes at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psycopg
import pytest

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.errors import NotLeading
from eagle_eye.server.model.records import CellStatus, JobCell
from eagle_eye.server.monitor.cells import Cells
from eagle_eye.server.store.leadership import Leadership
from eagle_eye.server.store.settings import RecordsSettings, check
from eagle_eye.server.store.sql_store import SqlStore, leadership_of, open_records
from eagle_eye.server.store.store import ACTIONS, INCIDENTS, JOB_CELLS, Change
from tests.server.builders import NOW, FakeClock, FakeWatcher, action
from tests.server.postgresql_server import PostgresqlServer
from tests.server.test_store_races import Between, Watched

LEASE_S = 60.0


class Clock:
    """Of the leases: stands still, until it is set forward."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Server:
    """What leads a cell, and its records."""

    def __init__(self, url: str, cell: str, clock: Clock, name: str = "") -> None:
        settings = RecordsSettings(url, lease_s=LEASE_S, cell=cell)
        self.leadership: Leadership = leadership_of(settings, f"http://{name or cell}", clock)
        try:
            self.leadership.step()
            self.store: SqlStore = open_records(settings, Path("/-"), self.leadership)
        except BaseException:
            self.leadership.close()
            raise
        at = FakeClock()
        self.cells = Cells(cell, self.store, self.leadership, at, Fleet(100), FakeWatcher(at))

    def close(self) -> None:
        self.store.close()
        self.leadership.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def url(postgresql: PostgresqlServer) -> str:
    return postgresql.new_database()


@pytest.fixture
def servers(url: str, clock: Clock) -> Iterator[dict[str, Server]]:
    """The leaders of two cells."""
    with ExitStack() as stack:
        yield {cell: stack.enter_context(closing(Server(url, cell, clock))) for cell in ("default", "b")}


def belongs(job: str, cell: str) -> JobCell:
    return JobCell(job=job, cell=cell, nodes=4, since_s=NOW, by="server")


def test_cells_lead_at_the_same_time_each_by_its_own_lease(servers: dict[str, Server]) -> None:
    for name, server in servers.items():
        assert server.leadership.leads
        server.store.commit(Change(actions=(action(f"act_{name}"),)))
    assert {one.id for one in servers["b"].store.all(ACTIONS)} == {"act_default", "act_b"}


def test_a_former_leader_of_a_cell_writes_nothing_and_the_other_cell_goes_on(
    servers: dict[str, Server], url: str, clock: Clock
) -> None:
    standby = Server(url, "b", clock, name="b2")
    try:
        assert standby.leadership.left_s() == 0.0
        clock.now_s += LEASE_S + 1.0
        servers["default"].leadership.step()  # renews its own
        standby.leadership.step()
        assert standby.leadership.left_s() > 0.0
        clock.now_s -= LEASE_S + 1.0  # for the former leader no time has passed: only the records tell
        with pytest.raises(NotLeading):
            servers["b"].store.commit(Change(actions=(action("act_late"),)))
        servers["default"].store.commit(Change(actions=(action("act_default"),)))
        assert [one.id for one in standby.store.all(ACTIONS)] == ["act_default"]
    finally:
        standby.close()


def test_a_cells_first_server_makes_its_lease(servers: dict[str, Server], url: str) -> None:
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        assert connection.execute("SELECT count(*) FROM cell_leases").fetchone() == (1,)


@pytest.mark.parametrize("budget", [1, 2])
def test_two_cells_that_race_for_the_last_of_the_fleets_exclusions_exclude_no_more(
    servers: dict[str, Server], monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    policy = PolicySettings(mode="act", exclusions_fleet_ratio=0.0, exclusions_fleet_floor=budget)
    default, other = servers["default"], servers["b"]
    other.store.commit(Change(job_cells=(belongs("two", "b"),)))
    watched = []
    for server, job in ((default, "one"), (other, "two")):
        watched.append(Watched(server.store, policy, job))
        server.cells.read()
        watched[-1].loop.judge_share(server.cells)
    between = Between(default.store, other.store, watched[1].judge, monkeypatch)
    watched[0].judge()
    between.finish()
    assert between.error is None
    assert {one.job for one in other.store.all(INCIDENTS)} == {"one", "two"}
    assert len([one for one in other.store.all(ACTIONS) if one.kind == "exclude_node"]) == budget


def test_a_job_that_is_moved_while_it_is_judged_is_judged_by_its_new_cell_alone(
    servers: dict[str, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    default, other = servers["default"], servers["b"]
    watched = Watched(default.store, PolicySettings(mode="act"), "one")
    default.cells.read()
    watched.loop.judge_share(default.cells)  # which does not read again: it takes the job for its own
    between = Between(other.store, default.store, watched.judge, monkeypatch)
    other.store.update(lambda _: Change(job_cells=(belongs("one", "b"),)))
    between.finish()
    assert between.error is None
    assert default.cells.mine("one")
    assert default.store.all(INCIDENTS) == []
    assert [one.cell for one in default.store.all(JOB_CELLS)] == ["b"]


@pytest.fixture
def follower(servers: dict[str, Server], monkeypatch: pytest.MonkeyPatch) -> tuple[Cells, list[int]]:
    """What follows the other cells in cell b, which knows all that was written so far; and its questions since."""
    follower, store = servers["b"], servers["b"].store
    servers["default"].store.commit(Change(cells=(status("default"), status("b"))))
    follower.cells.begin(lambda: "")
    asyncio.run(follower.cells.catch_up())  # writes how it is itself
    asyncio.run(follower.cells.catch_up())
    asked: list[int] = []
    range_of = store.change_range

    def change_range() -> tuple[int, int]:
        asked.append(1)
        return range_of()

    monkeypatch.setattr(store, "change_range", change_range)
    return follower.cells, asked


def status(cell: str) -> CellStatus:
    return CellStatus(cell=cell, url=f"http://{cell}", epoch=1, nodes=0, jobs=0, problem="", updated_s=NOW)


def test_a_cell_asks_nothing_once_it_was_read_that_nothing_changed(
    servers: dict[str, Server], follower: tuple[Cells, list[int]]
) -> None:
    cells, asked = follower
    cells.note_newest(servers["b"].store.marks().newest, NOW + 0.1)
    asyncio.run(cells.catch_up())
    assert asked == []


def test_a_cell_asks_for_itself_where_what_was_read_is_older_than_its_own_look(
    servers: dict[str, Server], follower: tuple[Cells, list[int]]
) -> None:
    cells, asked = follower
    cells.note_newest(servers["b"].store.marks().newest, NOW - 0.1)
    asyncio.run(cells.catch_up())
    assert len(asked) == 1


def test_a_cell_takes_in_what_another_wrote_as_soon_as_it_was_read_that_something_changed(
    servers: dict[str, Server], follower: tuple[Cells, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells, _ = follower
    monkeypatch.setattr("eagle_eye.server.monitor.cells.LOOK_S", 600.0)  # it does not look by itself

    async def follow() -> None:
        came = asyncio.Event()
        monkeypatch.setattr(FakeWatcher, "take_over", lambda *_: came.set())
        following = asyncio.create_task(cells.run())
        servers["default"].store.commit(Change(job_cells=(belongs("one", "b"),)))
        cells.note_newest(servers["b"].store.marks().newest, NOW + 0.1)
        await asyncio.wait_for(came.wait(), 30.0)
        following.cancel()

    asyncio.run(follow())


def test_records_in_sqlite_have_no_other_cell() -> None:
    with pytest.raises(ConfigurationError, match=r"records\.url: expected a PostgreSQL URL"):
        check(RecordsSettings(cell="b"))


def test_a_cells_name_is_a_short_word() -> None:
    with pytest.raises(ConfigurationError, match=r"records\.cell: expected up to 32 lower-case"):
        check(RecordsSettings("postgresql://db/x", cell="B; DROP"))
