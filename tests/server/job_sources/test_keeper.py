"""What becomes of a scheduler's words: records, what the detection loop hears, and what is said when none come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.frame import Rank
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.jobs import keeper as keeping
from eagle_eye.server.jobs.keeper import JobSources, Schedulers
from eagle_eye.server.jobs.source import ScheduledJob, ScheduledNode, Snapshot, SourceFailed
from eagle_eye.server.model.records import Job, Node
from eagle_eye.server.store.sql_store import open_file
from eagle_eye.server.store.store import JOBS, NODES, Change
from eagle_eye.server.telemetry.counters import Telemetry
from tests.server.builders import NOW, FakeClock, FakeWatcher, frame, running, settings


@dataclass
class Scheduler:
    """Says what it is given, an exception by raising it, and then nothing."""

    words: list[Snapshot | SourceFailed]
    name: str = "slurm"
    patience_s: float = 30.0
    sooner: asyncio.Event | None = None
    reported: int = 0
    silent: asyncio.Event = field(default_factory=asyncio.Event)

    async def snapshots(self, sooner: asyncio.Event) -> AsyncGenerator[Snapshot, None]:
        self.sooner = sooner
        while self.words:
            word = self.words.pop(0)
            if isinstance(word, SourceFailed):
                raise word
            yield word
            self.reported += 1
        self.silent.set()
        await asyncio.Event().wait()


class Site:
    """One node, n1, whose agent sees job 17."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.store = open_file(folder / "records.db")
        self.store.commit(Change(nodes=(Node(node="n1", state="in_service", reason="", updated_s=NOW),)))
        self.fleet = Fleet(100)
        self.fleet.heard(frame(job="17", ranks=[Rank("17", 0, 1, 0)]), NOW)
        self.watcher = FakeWatcher(self.clock)
        self.telemetry = Telemetry()

    def keep(self, *words: Snapshot | SourceFailed) -> JobSources:
        """Take in all words, as the server would, until there are no more."""
        scheduler = Scheduler(list(words))
        parts = (self.store, self.clock, self.fleet, self.watcher, self.telemetry)
        sources = JobSources(Schedulers([(scheduler, "")], 30.0), *parts, jitter=lambda: 0.0)

        async def follow() -> None:
            task = asyncio.create_task(sources.run())
            await asyncio.wait_for(scheduler.silent.wait(), 10)
            self.watcher.ask_schedulers()
            assert scheduler.sooner is not None
            assert scheduler.sooner.is_set()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(follow())
        return sources

    def count(self, name: str, **labels: str) -> float:
        return self.telemetry.registry.get_sample_value(f"eagle_eye_{name}", {"source": "slurm", **labels}) or 0.0


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(keeping, "BACKOFF_S", 0.01)
    made = Site(tmp_path)
    yield made
    made.store.close()


def says(state: Any = "running", asked_s: float = NOW, **more: Any) -> Snapshot:
    job = ScheduledJob("17", "17", state, 0, ("n1",), NOW - 100, said=state.upper())
    return Snapshot(asked_s, (job,), **more)


def test_a_schedulers_word_is_on_record_in_the_audit_trail_and_with_the_detection_loop(site: Site) -> None:
    site.keep(says(), says("cancelled", NOW + 5))
    job = site.store.get(JOBS, "17")
    assert job is not None
    assert (job.state, job.scheduled_as) == ("cancelled", "slurm:17")
    assert [job.state for job in site.watcher.jobs] == ["running", "cancelled"]
    assert [(word.heard_s, set(word.jobs)) for word in site.watcher.words] == [
        (None, set()),
        (NOW, {"17"}),
        (NOW + 5, {"17"}),
    ]
    entries = [(entry.who, entry.verb, entry.subject, entry.detail) for entry in site.store.audit().items]
    assert entries[0] == ("slurm", "job", "17", "attempt 0 cancelled, 0 ranks; slurm:17 CANCELLED")
    assert len(entries) == 2


def test_the_same_word_again_is_not_written_but_heard(site: Site) -> None:
    before = site.store.change_range()
    site.keep(says(), says(asked_s=NOW + 10), says(asked_s=NOW + 20))
    assert site.store.change_range()[1] - before[1] == 1
    assert site.watcher.words[-1].heard_s == NOW + 20


def test_a_failure_is_counted_named_and_tried_again(site: Site) -> None:
    sources = site.keep(SourceFailed("refused", "squeue ended with 1"), says())
    assert site.count("job_source_answers_total", outcome="refused") == 1
    assert site.count("job_source_answers_total", outcome="ok") == 1
    assert sources.problem() == "ok"
    site.clock.advance(31)
    assert sources.problem() == "slurm was not heard for 31 s"
    assert sources.ages_s() == {"slurm": 31}


def test_a_source_that_never_answers_is_named_with_its_reason_once_its_patience_is_over(site: Site) -> None:
    sources = site.keep(SourceFailed("refused", "squeue ended with 1"))
    assert sources.problem() == "ok"
    site.clock.advance(31)
    assert sources.problem() == "slurm was not heard for 31 s: squeue ended with 1"
    assert sources.ages_s() == {}
    assert site.store.get(JOBS, "17") is None


def test_a_failure_makes_no_job_gone(site: Site) -> None:
    site.keep(says(), SourceFailed("timeout", "no answer"))
    job = site.store.get(JOBS, "17")
    assert job is not None
    assert job.state == "running"


def test_drains_and_reservations_of_nodes_are_taken_over(site: Site) -> None:
    node = ScheduledNode("n1", "draining", "bad fan", drained=True, maintenance=True)
    site.keep(says(nodes=(node,)), says())
    record, job = site.store.get(NODES, "n1"), site.store.get(JOBS, "17")
    assert record is not None
    assert job is not None
    assert (record.state, record.by, record.reason) == ("draining", "slurm", "bad fan")
    assert job.state == "maintenance"


def test_what_could_not_be_used_is_counted(site: Site) -> None:
    site.keep(says(left_out={"host_list": 2}))
    assert site.count("job_source_left_out_total", reason="host_list") == 2


def test_what_agents_said_long_ago_does_not_count(site: Site) -> None:
    site.clock.advance(keeping.SEEN_S + 1)
    site.keep(says("cancelled"))
    assert site.store.get(JOBS, "17") is None


def test_a_launchers_job_stays_its_own_while_the_scheduler_speaks_of_its_end(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        put = {"attempt": 0, "state": "running", "ranks": [{"rank": 0, "node": "n1", "device": 0}]}
        answer = server.client.put("/api/v1/jobs/17", json=put).json()
        assert (answer["source"], answer["declared_state"]) == ("launcher", "running")
        record = server.dispatcher.services.store.get(JOBS, "17")
        assert isinstance(record, Job)
        reported = Job(**{**{f: getattr(record, f) for f in record.__struct_fields__}, "scheduled_state": "cancelled"})
        server.dispatcher.services.store.commit(Change(jobs=(reported,)))
        assert server.client.put("/api/v1/jobs/17", json=put).json()["state"] == "cancelled"
        assert [job["job"] for job in server.client.get("/api/v1/jobs?node=n1").json()["items"]] == ["17"]


def test_readyz_names_a_scheduler_that_does_not_answer(tmp_path: Path) -> None:
    clock = FakeClock()
    flags: dict[str, Any] = {"job_sources__slurm__use": "squeue", "job_sources__slurm__squeue": f"{tmp_path}/absent"}
    with running(tmp_path / "data", clock, **flags) as server:
        assert server.client.get("/readyz").json()["checks"]["job_sources"] == "ok"
        clock.advance(61)
        said = server.client.get("/readyz").json()["checks"]["job_sources"]
        assert said.startswith("slurm was not heard for 61 s")
        assert "job_source_age_seconds" in server.client.get("/metrics").text


def test_without_sources_readyz_does_not_speak_of_them(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        assert "job_sources" not in server.client.get("/readyz").json()["checks"]


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ({"job_sources__slurm__use": "rest"}, "job_sources.slurm.url"),
        ({"job_sources__slurm__version": "42"}, "job_sources.slurm.version"),
        ({"job_sources__kubernetes__url": "kube:6443"}, "job_sources.kubernetes.url"),
        ({"job_sources__kubernetes__job_labels": ["a b"]}, "job_sources.kubernetes.job_labels"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_key(tmp_path: Path, flags: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigurationError, match=key):
        settings(tmp_path, **flags)
