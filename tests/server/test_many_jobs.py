"""Many jobs that are in trouble in one tick: written down together, each with what was decided for those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagle_eye.detectors.types import Evidence, Verdict
from eagle_eye.server.engine.engine import Engine
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.settings import DetectionSettings, PolicySettings
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.monitor.detection_loop import CHANGED_AT_ONCE, DetectionLoop
from eagle_eye.server.store.sql_store import SqlStore, open_file
from eagle_eye.server.store.sql_write import RecordsWriter
from eagle_eye.server.store.store import ACTIONS, INCIDENTS, Change
from tests.server.builders import NOW, FakeClock

JOBS = CHANGED_AT_ONCE + 2


class AllHung(Engine):
    """Judges that a node of each job holds it up."""

    def judging(
        self,
        now_s: float,
        _concerned: Callable[[str], bool] = lambda _: False,
        _mine: Callable[[str], bool] = lambda _: True,
    ) -> Iterator[Judgement]:
        for job in range(JOBS):
            yield hung(f"job{job}", now_s)


def hung(job: str, now_s: float) -> Judgement:
    node = f"{job}-n0"
    verdict = Verdict(
        detector="hang",
        fault="hang",
        job=job,
        nodes=(node,),
        node=node,
        device=None,
        confidence=0.97,
        onset_s=NOW,
        summary="holds the job up",
        evidence=(Evidence("rank_silence_seconds", node, 0, 20.0),),
        kinds=frozenset({"standstill", "rank_silence"}),
    )
    return Judgement(job, 0, now_s, (verdict,), members=8, heard=8, stepping=True, advanced_s=NOW)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    made = open_file(tmp_path / "records.db")
    yield made
    made.close()


def watch_over(store: SqlStore) -> DetectionLoop:
    policy = PolicySettings(mode="act", exclusions_fleet_floor=3)
    return DetectionLoop(AllHung(DetectionSettings(), NOW), store, FakeClock(), policy, "http://eagle-eye:8470")


def test_the_fleets_budget_counts_what_is_asked_for_in_the_same_tick(store: SqlStore) -> None:
    watch_over(store).tick(NOW + 1)
    assert len(store.open_incidents()) == JOBS
    assert [action.job for action in store.all(ACTIONS)] == ["job0", "job1", "job2"]
    held = [incident.hold_rule for incident in store.open_incidents() if incident.state != "acting"]
    assert held == ["fleet_exclusions"] * (JOBS - 3)


def test_a_tick_costs_as_many_transactions_as_there_are_batches(store: SqlStore) -> None:
    commits: list[None] = []
    store.listen(lambda: commits.append(None))
    watch_over(store).tick(NOW + 1)
    assert len(commits) == 2


def test_what_could_not_be_written_is_decided_again(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_over(store)

    def refused(_: RecordsWriter, __: Change) -> None:
        raise StoreUnavailable("the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(RecordsWriter, "write", refused)
        with pytest.raises(StoreUnavailable):
            watch.tick(NOW + 1)
    assert store.all(INCIDENTS) == []
    watch.tick(NOW + 2)
    assert len(store.open_incidents()) == JOBS
    assert len(store.all(ACTIONS)) == 3
