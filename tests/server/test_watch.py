"""The detection loop on a fake clock over a real store: what it writes, what it forgives, what it never repeats."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eagle_eye.detectors.types import Series
from eagle_eye.schema import action as schema
from eagle_eye.server.engine.engine import Engine
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.ledger import mark_false, report_action
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.batch import batches_of
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.records import Gpu, Subscription
from eagle_eye.server.monitor.detection_loop import DetectionLoop, Intake
from eagle_eye.server.store.sql_store import open_file
from eagle_eye.server.store.store import ACTIONS, DELIVERIES, INCIDENTS, Change
from tests.server.builders import Reached
from tests.server.engine.frames import SETTINGS, START_S, Fleet
from tests.server.engine.test_rows import row_of


@dataclass
class TwoClocks:
    """Wall and monotonic time, which a test can tear apart."""

    wall_s: float = START_S
    steady_s: float = 0.0

    def now_s(self) -> float:
        return self.wall_s

    def monotonic_s(self) -> float:
        return self.steady_s

    def advance(self, seconds: float) -> None:
        self.wall_s += seconds
        self.steady_s += seconds


class Site:
    """A fleet whose frames go to a DetectionLoop, one tick a second."""

    def __init__(self, folder: Path) -> None:
        self.store = open_file(folder / "records.db")
        self.clock = TwoClocks()
        self.fleet = Fleet()
        self.watch = self.new_watch()
        self.sent: list[tuple[object, float]] = []
        self.by_rows = False  # where nothing else happens, as agents send

    def new_watch(self) -> DetectionLoop:
        engine = Engine(SETTINGS, watching_since_s=self.clock.now_s())
        policy = PolicySettings(mode="act", verdict_gone_s=10)
        return DetectionLoop(engine, self.store, self.clock, policy, "http://eagle-eye:8470")

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.advance(1.0)
            self.fleet.now_s = self.clock.now_s()
            self.fleet.step += 0.0 if self.fleet.stopped else 1.0
            for node in self.fleet.nodes:
                if node not in self.fleet.mute:
                    frame = self.fleet.frame(node)
                    self.sent.append((frame, self.clock.now_s()))
                    if self.by_rows and node not in self.fleet.silent_s:
                        self.watch.observe_rows(batches_of([row_of(frame)]))
                    else:
                        self.watch.observe(frame, self.clock.now_s(), 0.0)
            self.watch.tick(self.clock.now_s())

    def hang(self) -> None:
        self.run(30)
        self.fleet.stopped, self.fleet.silent_s = True, {"n1": 9.0}
        self.run(12)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.store.close()


def test_a_hang_becomes_an_incident_an_action_and_a_delivery(site: Site) -> None:
    subscriber = Subscription(
        id="sub",
        url="http://launcher/",
        format="cloudevents",
        types=[schema.ACTION_REQUESTED],
        jobs=["j"],
        secrets=["whsec_x"],
        active=True,
        created_s=START_S,
    )
    site.store.commit(Change(subscriptions=(subscriber,)))
    site.hang()
    (incident,), (action,) = site.store.all(INCIDENTS), site.store.all(ACTIONS)
    assert (incident.fault, incident.node, incident.state) == ("hang", "n1", "acting")
    assert (action.kind, action.exclude, action.state) == ("exclude_node", ["n1"], "requested")
    assert [d.type for d in site.store.all(DELIVERIES)] == [schema.ACTION_REQUESTED]


def test_a_job_whose_agents_send_rows_is_judged_in_each_tick(site: Site) -> None:
    site.by_rows = True
    site.run(30)
    (course,) = site.watch.courses()
    assert (course.step, course.progressed_s) == (site.fleet.step, site.clock.now_s())
    site.fleet.stopped = True
    site.run(12)
    assert [i.fault for i in site.store.all(INCIDENTS)] == ["hang"]


def test_who_asks_between_ticks_is_reported_rows_too(site: Site) -> None:
    site.run(30)
    site.fleet.step += 1
    site.clock.advance(1.0)
    site.fleet.now_s = site.clock.now_s()
    site.watch.observe_rows(batches_of([row_of(site.fleet.frame("n0"))]))
    reported = {latest.value for latest in site.watch.latest() if (latest.metric, latest.node) == ("train_step", "n0")}
    progress = site.watch.progress("j")
    assert progress is not None
    assert ({progress.step}, reported) == ({site.fleet.step}, {site.fleet.step})


def test_a_server_that_was_killed_repeats_nothing(site: Site) -> None:
    site.hang()
    site.watch = site.new_watch()
    site.watch.recover((frame, received_s) for frame, received_s in site.sent)  # type: ignore[misc]  # frames they are
    site.run(10)
    assert len(site.store.all(INCIDENTS)) == 1
    assert len(site.store.all(ACTIONS)) == 1


def test_a_server_that_was_away_does_not_take_its_absence_for_recovery(site: Site) -> None:
    site.hang()
    site.clock.advance(60.0)
    site.fleet.silent_s = {}  # the verdict is not repeated at once
    site.fleet.stopped = False
    site.watch = site.new_watch()
    site.watch.recover((frame, received_s) for frame, received_s in site.sent)  # type: ignore[misc]  # frames they are
    site.run(3)
    assert [i.state for i in site.store.all(INCIDENTS)] == ["acting"]
    assert [a.state for a in site.store.all(ACTIONS)] == ["requested"]


def test_a_time_in_which_nobody_watched_is_nobodys_silence(site: Site) -> None:
    site.run(30)
    site.clock.advance(600.0)
    site.watch.tick(site.clock.now_s())
    assert site.store.all(INCIDENTS) == []


def test_a_clock_that_was_set_is_nobodys_silence(site: Site) -> None:
    site.run(30)
    site.clock.wall_s += 3600.0
    site.clock.steady_s += 1.0
    site.watch.tick(site.clock.now_s())
    assert site.store.all(INCIDENTS) == []


def test_a_subscribers_report_counts_at_the_next_tick(site: Site) -> None:
    site.hang()
    (action,) = site.store.all(ACTIONS)
    reported = report_action(action, schema.Report("refused", "no spare"), "launcher", site.clock.now_s())
    site.store.commit(Change(actions=(reported,)))
    site.run(1)
    (incident,) = site.store.all(INCIDENTS)
    assert incident.state == "confirmed"
    assert "refused" in incident.hold


def test_a_false_alarm_stays_one(site: Site) -> None:
    site.hang()
    (incident,) = site.store.all(INCIDENTS)
    site.store.commit(Change(incidents=(mark_false(incident, site.clock.now_s()),)))
    site.run(5)
    assert [i.state for i in site.store.all(INCIDENTS)] == ["false"]
    assert len(site.store.all(ACTIONS)) == 1


def test_an_incident_is_not_written_anew_at_every_tick(site: Site) -> None:
    site.hang()
    _, before = site.store.change_range()
    site.run(10)
    _, after = site.store.change_range()
    assert after - before <= 4, "seen_s is refreshed now and then, not at each of 10 ticks"


def test_most_of_the_fleet_silent_is_blindness_and_not_guilt(site: Site) -> None:
    site.run(30)
    site.fleet.stopped, site.fleet.mute = True, {"n0", "n1"}
    site.run(20)
    assert site.store.all(ACTIONS) == []
    assert "node_silent" in site.watch.blind()


def test_the_loop_explains_what_its_rules_say_of_an_incident(site: Site) -> None:
    site.hang()
    (incident,) = site.store.all(INCIDENTS)
    weighing = site.watch.explain(incident)
    assert weighing is not None
    assert weighing.decision.rule == "under_way"
    assert site.watch.explain(msgspec.structs.replace(incident, attempt=7)) is None


def test_an_action_older_than_policys_window_is_not_asked_for_again(site: Site) -> None:
    site.watch.use_policy(PolicySettings(mode="act", verdict_gone_s=10, window_s=5, repeat_window_s=5))
    site.hang()
    site.run(12)
    assert [a.state for a in site.store.all(ACTIONS)] == ["requested"]
    assert [i.state for i in site.store.all(INCIDENTS)] == ["acting"]


def test_other_jobs_on_a_node_are_named_to_whoever_excludes_it(site: Site) -> None:
    site.run(5)
    frame = site.fleet.frame("n1")
    other = msgspec.structs.replace(
        frame, stream="other", ranks=[msgspec.structs.replace(rank, job="k", device=5) for rank in frame.ranks]
    )
    site.watch.observe(other, site.clock.now_s(), 0.0)
    site.hang()
    (action,) = site.store.all(ACTIONS)
    assert "n1 also runs k" in action.summary


def test_what_was_the_newest_for_long_is_no_value_of_now(site: Site) -> None:
    site.run(5)
    assert {value.node for value in site.watch.latest()} == set(site.fleet.nodes)
    site.fleet.mute = set(site.fleet.nodes)
    site.run(32)
    assert list(site.watch.latest()) == []


def test_after_a_restart_no_value_of_before_is_shown_as_one_of_now(site: Site) -> None:
    site.run(5)
    site.clock.advance(300.0)
    again = site.new_watch()
    again.recover((frame, received_s) for frame, received_s in site.sent)  # type: ignore[misc]
    assert list(again.latest()) == []


class Again:
    """What agents send again, as a test says."""

    def __init__(self) -> None:
        self.missing: set[str] = set()
        self.is_ready = False

    def incomplete(self) -> set[str]:
        return self.missing

    def ready(self) -> bool:
        return self.is_ready

    def taken_in(self) -> None:
        self.is_ready = False


def lines(site: Site) -> int:
    engine = site.watch._engine
    (track,) = engine.tracks()
    return len(engine.window(track, site.clock.now_s(), START_S).times_s)


def taken_over(site: Site) -> Again:
    """Have a new leader judge that has seen nothing."""
    again, past = Again(), tuple(site.sent)
    site.watch = site.new_watch()
    site.watch.recover(())
    site.watch.follow(again, lambda: (*past, *site.sent[len(past) :]))  # type: ignore[arg-type]
    return again


def test_once_all_was_sent_again_the_windows_are_as_after_a_restart(site: Site) -> None:
    site.run(60)
    again = taken_over(site)
    site.run(5)
    assert lines(site) == 5
    again.is_ready = True
    site.run(1)
    assert lines(site) == 66
    progress = site.watch.progress("j")
    assert progress is not None
    assert (progress.step, progress.step_s) == (site.fleet.step, 1.0)


def test_what_comes_while_the_windows_are_filled_anew_is_in_them_once(site: Site) -> None:
    site.run(30)
    again = taken_over(site)
    site.run(2)
    again.is_ready = True
    parts = site.watch._refilling()
    next(parts)
    site.clock.advance(1.0)
    site.fleet.now_s, site.fleet.step = site.clock.now_s(), site.fleet.step + 1.0
    for node in site.fleet.nodes:
        site.watch.observe(site.fleet.frame(node), site.clock.now_s(), 0.0)
    for _ in parts:
        pass
    site.watch.tick(site.clock.now_s())
    assert lines(site) == 33


def test_an_incident_is_not_over_while_it_cannot_be_told_and_no_other_is_made_up(site: Site) -> None:
    site.hang()
    again = taken_over(site)
    again.missing = {"n0"}
    site.fleet.stopped, site.fleet.silent_s = False, {}
    site.run(60)
    assert [(one.fault, one.state) for one in site.store.all(INCIDENTS)] == [("hang", "acting")]
    assert "the last minutes of 1 nodes are not whole yet" in site.watch.blind().values()
    again.missing = set()
    site.run(2)
    assert [(one.fault, one.state) for one in site.store.all(INCIDENTS)] == [("hang", "recovered")]


def test_a_fault_is_found_while_the_past_is_not_whole(site: Site) -> None:
    site.run(30)
    taken_over(site).missing = set(site.fleet.nodes)
    site.hang()
    assert [(one.fault, one.node) for one in site.store.all(INCIDENTS)] == [("hang", "n1")]


def test_what_gpus_are_called_is_known_after_a_restart(site: Site) -> None:
    site.run(5)
    seats = [("GPU-old", "H100", 1.0), ("GPU-new", "GB200", 2.0)]
    cards = (
        Gpu(uuid=uuid, node="n1", device=0, model=model, since_s=seen_s, first_seen_s=seen_s, seen_s=seen_s)
        for uuid, model, seen_s in reversed(seats)
    )
    site.store.commit(Change(gpus=tuple(cards)))
    engine = Engine(SETTINGS, watching_since_s=site.clock.now_s())
    DetectionLoop(engine, site.store, site.clock, PolicySettings(), "").recover(())
    assert engine.gpu_models.named([Series("n1", 0)]).models == ("GB200",)


def test_how_long_a_look_took_is_counted(site: Site) -> None:
    async def story() -> None:
        task = asyncio.create_task(site.watch.run())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(story())
    (family,) = site.watch.tick_seconds.collect()
    assert next(sample.value for sample in family.samples if sample.name.endswith("_count")) == 1


@pytest.mark.parametrize(("look_s", "rest_s"), [(0.01, 1.0), (0.25, 1.5), (3.0, 2.0)])
def test_the_longer_a_look_took_the_later_is_the_next(
    site: Site, monkeypatch: pytest.MonkeyPatch, look_s: float, rest_s: float
) -> None:
    rests_s: list[float] = []

    async def sleep(seconds: float) -> None:
        if seconds:
            rests_s.append(seconds)
            raise asyncio.CancelledError

    def judging(_: float) -> Iterator[Judgement]:
        site.clock.advance(look_s)
        return iter(())

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(Engine, "judging", lambda _, now_s, _concerned, _mine: judging(now_s))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(site.watch.run())
    assert rests_s == [pytest.approx(rest_s)]


def test_what_comes_during_a_look_at_jobs_is_seen_by_the_next() -> None:
    engine, fleet = Engine(SETTINGS, watching_since_s=START_S), Fleet()
    intake = Intake(engine)
    intake.hold()
    intake.observe(fleet.frame("n0"), START_S)
    intake.observe_rows(batches_of([row_of(fleet.frame("n1"))]))
    seen_at: list[int] = []
    intake.observe_in_turn(lambda: seen_at.append(engine.node_count))
    intake.take_in()
    assert (engine.node_count, seen_at) == (0, [])
    intake.release()
    intake.take_in()
    assert (engine.node_count, seen_at) == (2, [2])


def test_what_waits_behind_something_that_fails_is_seen_all_the_same() -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bug")

    engine, fleet = Engine(SETTINGS, watching_since_s=START_S), Fleet()
    intake = Intake(engine)
    intake.hold()
    intake.observe(fleet.frame("n0"), START_S)
    intake.observe_in_turn(fail)
    intake.observe_rows(batches_of([row_of(fleet.frame("n1"))]))
    intake.release()
    with pytest.raises(ZeroDivisionError, match="a bug"):
        intake.take_in()
    intake.take_in()
    assert engine.node_count == 2


@pytest.mark.parametrize("hours", [1.0, -1.0])
def test_a_clock_that_was_set_is_no_standstill_of_the_job(site: Site, hours: float) -> None:
    site.run(31)
    site.clock.wall_s += hours * 3600.0
    site.run(20)
    assert site.store.all(INCIDENTS) == []


def test_a_standstill_is_as_long_as_it_was_when_the_clock_is_set(site: Site) -> None:
    site.run(30)
    site.fleet.stopped = True
    site.run(4)
    site.clock.wall_s += 3600.0
    site.run(2)
    assert site.store.all(INCIDENTS) == []
    site.run(8)
    assert [i.fault for i in site.store.all(INCIDENTS)] == ["hang"]


def test_records_that_cannot_be_used_are_said_once_and_once_that_they_can(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = 0
    page = site.store.page

    def read(*words: Any, **named: Any) -> Any:
        nonlocal refused
        refused += 1
        if refused <= 5:
            raise StoreUnavailable("records.db is damaged")
        return page(*words, **named)

    monkeypatch.setattr(site.store, "page", read)
    monkeypatch.setattr(site.watch._engine, "settings", msgspec.structs.replace(SETTINGS, tick_s=0.005))

    async def loop() -> None:
        task = asyncio.create_task(site.watch.run())
        while site.watch.ticked_s() is None:  # noqa: ASYNC110 - the loop announces nothing
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(loop())
    said = [record for record in caplog.records if record.name == "eagle_eye.server.monitor.detection_loop"]
    assert [record.levelname for record in said] == ["ERROR", "WARNING"]
    assert "records.db is damaged" in said[0].getMessage()
    assert not any(record.exc_info for record in said)


@pytest.fixture
def records(site: Site, monkeypatch: pytest.MonkeyPatch) -> Reached:
    """What the site's loop has for records."""
    found = Reached(site.store)
    monkeypatch.setattr(site, "store", found)
    site.watch = site.new_watch()
    return found


def run_without(site: Site, records: Reached, seconds: int) -> None:
    records.away = True
    for _ in range(seconds):
        with pytest.raises(StoreUnavailable):
            site.run(1)
    records.away = False


def test_what_happens_while_the_records_are_away_is_judged_and_decided_once_they_are_back(
    site: Site, records: Reached
) -> None:
    site.run(30)
    site.fleet.stopped, site.fleet.silent_s = True, {"n1": 9.0}
    run_without(site, records, 90)
    assert site.watch.judged_s() == site.clock.monotonic_s()
    site.run(1)
    (incident,), (action,) = site.store.all(INCIDENTS), site.store.all(ACTIONS)
    assert (incident.fault, incident.node, action.exclude) == ("hang", "n1", ["n1"])
    assert incident.detected_s - incident.onset_s >= 80.0
    site.run(12)
    assert len(site.store.all(ACTIONS)) == 1


def test_an_incident_is_not_over_because_nothing_could_be_recorded_for_a_time(site: Site, records: Reached) -> None:
    site.watch.use_policy(PolicySettings(mode="observe", verdict_gone_s=10))
    site.hang()
    run_without(site, records, 60)
    site.fleet.stopped, site.fleet.silent_s = False, {}
    site.run(1)
    assert [one.state for one in site.store.all(INCIDENTS)] == ["confirmed"]
    site.run(12)
    assert [one.state for one in site.store.all(INCIDENTS)] == ["recovered"]
