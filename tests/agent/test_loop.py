from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from eagle_eye.agent.clock import Wake
from eagle_eye.agent.collector import CollectFailed, CollectorRunner, Drops, Observed, TickFrame, Unsupported
from eagle_eye.agent.loop import Loop, LoopListeners, LoopSettings, LoopSources, ServiceManager
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import EVENTS_MAX, FRAME_BYTES_MAX, RANKS_MAX, Frame, Rank, values_of
from eagle_eye.schema.rows import read_written
from tests.agent.fakes import FakeClock, until


class Scripted:
    """A collector that does what it is told."""

    def __init__(self, name: str, collect: Callable[[], Observed]) -> None:
        self.name = name
        self.asked = 0
        self._collect = collect

    def collect(self, now_s: float) -> Observed:
        self.asked += 1
        return self._collect()

    def close(self) -> None:
        pass


class Station:
    """A loop on a fake clock with the frames that it made."""

    def __init__(
        self,
        clock: FakeClock,
        *collectors: Scripted,
        job: str = "",
        interval_s: float = 1.0,
        service: ServiceManager | None = None,
    ) -> None:
        self.clock = clock
        self.drops = Drops()
        self.frames: list[Frame] = []
        self.bytes: list[int] = []
        self.wake = Wake()
        self.news = Observed()
        self.runners = [CollectorRunner(each, self.drops, clock.monotonic_s) for each in collectors]
        self.on_frame: Callable[[], None] = lambda: None
        self.shown: list[TickFrame] = []
        self.loop = Loop(
            LoopSettings("n1", job, interval_s),
            LoopSources(self.runners, lambda: self.news, self.wake),
            self,
            self.drops,
            clock,
            LoopListeners(shown=self.shown.append, service=service),
        )

    def append(self, make: Callable[[str, int], bytes]) -> int | None:
        raw = make("stream", len(self.frames) + 1)
        self.bytes.append(len(raw))
        self.frames.append(read_written(raw).frame)
        self.on_frame()
        return len(self.frames)

    def run(self, frames: int) -> list[Frame]:
        """Run until so many frames are made and the loop was told to stop."""
        self.on_frame = lambda: self.loop.stop("SIGTERM") if len(self.frames) == frames else None
        self.loop.run()
        return self.frames


def node_row() -> Observed:
    return Observed(node={"node_memory_used_ratio": 0.5})


def failing(error: Exception) -> Callable[[], Observed]:
    def fail() -> Observed:
        raise error

    return fail


def test_frames_end_at_multiples_of_the_interval() -> None:
    station = Station(FakeClock(1000.3), Scripted("host", node_row), interval_s=2.0)
    frames = station.run(3)
    assert [each.time_s for each in frames[:3]] == [1002.0, 1004.0, 1006.0]
    assert [each.interval_s for each in frames[1:3]] == [2.0, 2.0]


def test_start_and_stop_are_told() -> None:
    station = Station(FakeClock(1000.3), Scripted("host", node_row))
    frames = station.run(2)
    assert [(e.kind, len(e.attributes)) for e in frames[0].events] == [("agent_start", 1)]
    assert [(e.kind, e.attributes) for e in frames[-1].events] == [("agent_stop", {"reason": "SIGTERM"})]
    assert len(frames) == 3


def test_a_failing_collector_does_not_stop_the_others() -> None:
    bad = Scripted("bad", failing(CollectFailed("gpu 3: GPU is lost")))
    worse = Scripted("worse", failing(ZeroDivisionError("oops")))
    never = Scripted("never", failing(Unsupported("no such thing here")))
    good = Scripted("good", node_row)
    station = Station(FakeClock(1000.3), bad, worse, never, good)
    last = station.run(3)[2]
    assert last.collectors == {
        "bad": "failed: gpu 3: GPU is lost",
        "worse": "failed: ZeroDivisionError('oops')",
        "never": "unsupported: no such thing here",
        "good": "ok",
    }
    assert list(values_of(last.blocks[0])) == [0.5]
    assert never.asked == 1
    assert bad.asked > 2


def test_rows_of_several_collectors_for_one_device_are_one_row() -> None:
    gpu = Scripted("nvml", lambda: Observed(devices={0: {"gpu_power_watts": 300.0}}))
    rank = Scripted("training", lambda: Observed(devices={0: {"train_step": 7.0}}))
    (block,) = Station(FakeClock(1000.3), gpu, rank).run(1)[0].blocks
    assert (block.keys, block.metrics, list(values_of(block))) == ([0], ["train_step", "gpu_power_watts"], [7.0, 300.0])


def test_news_make_a_frame_at_once_and_ticks_go_on() -> None:
    clock = FakeClock(1000.3)
    station = Station(clock, Scripted("host", node_row))
    rank = Rank("j", 0, 1, 0, pid=5)

    def on_wait(_timeout_s: float) -> None:
        if len(station.frames) == 1 and clock.wall_s < 1001.1:
            clock.advance(0.2)
            station.news = Observed(events=[Event(1001.2, "process_exit", 0, {"exit_code": -11})], ranks=[rank])
            station.wake.set()

    clock.on_wait = on_wait
    frames = station.run(3)
    assert [each.time_s for each in frames[:3]] == pytest.approx([1001.0, 1001.2, 1002.0])
    assert [e.kind for e in frames[1].events] == ["process_exit"]
    assert frames[1].ranks == [rank]
    assert frames[1].blocks == []
    assert frames[1].interval_s == pytest.approx(0.2)
    assert frames[2].interval_s == 1.0


def test_many_news_at_once_make_few_frames() -> None:
    clock = FakeClock(1000.3)
    station = Station(clock, Scripted("host", node_row))
    clock.on_wait = lambda _timeout_s: station.wake.set() or clock.advance(0.001)  # type: ignore[func-returns-value]
    frames = station.run(12)
    assert clock.passed_s > 1.0
    assert len(frames) == 13


def test_after_a_long_stop_missed_ticks_are_skipped() -> None:
    clock = FakeClock(1000.3)
    station = Station(clock, Scripted("host", node_row))
    slept: list[float] = []

    def on_wait(_timeout_s: float) -> None:
        if len(station.frames) == 1 and not slept:
            slept.append(1.0)
            clock.advance(60.0)

    clock.on_wait = on_wait
    frames = station.run(3)
    assert [each.time_s for each in frames[:3]] == pytest.approx([1001.0, 1061.7, 1062.7], abs=0.4)
    assert frames[1].interval_s == pytest.approx(60.0, abs=1.5)
    assert frames[2].interval_s == 1.0


@pytest.mark.parametrize("jump_s", [-1000.0, 1000.0])
def test_a_jump_of_the_wall_clock_neither_stops_nor_hurries_the_loop(jump_s: float) -> None:
    clock = FakeClock(1000.3)
    station = Station(clock, Scripted("host", node_row))
    jumped: list[float] = []

    def on_wait(_timeout_s: float) -> None:
        if len(station.frames) == 2 and not jumped:
            jumped.append(jump_s)
            clock.jump(jump_s + 0.4)

    clock.on_wait = on_wait
    frames = station.run(5)
    assert clock.passed_s < 7.0
    assert frames[4].time_s == pytest.approx(1005.0 + jump_s, abs=1.1)
    assert frames[4].time_s % 1.0 == 0.0


@pytest.mark.parametrize(
    ("configured", "jobs", "expected"),
    [("", ["a", "a"], "a"), ("", ["a", "b"], None), ("", [], None), ("c", ["a"], "c")],
)
def test_the_job_is_the_configured_one_or_the_only_one(configured: str, jobs: list[str], expected: str | None) -> None:
    ranks = [Rank(job, index, 2, index) for index, job in enumerate(jobs)]
    station = Station(FakeClock(1000.3), Scripted("training", lambda: Observed(ranks=ranks)), job=configured)
    assert station.run(1)[0].job == expected


def test_a_frame_of_too_many_texts_is_cut_and_counted() -> None:
    events = [Event(1000.0, "training_error", 0, {"text": "x" * 16_000}) for _ in range(100)]
    first = Station(FakeClock(1000.3), Scripted("training", lambda: Observed(events=events)))
    first.run(1)
    assert first.bytes[0] <= FRAME_BYTES_MAX
    assert first.drops.snapshot()["events_oversized"] > 0


def test_what_is_beyond_a_frames_limits_is_counted() -> None:
    def crowd() -> Observed:
        ranks = [Rank("j", rank, 2_000, 0) for rank in range(RANKS_MAX + 3)]
        return Observed(ranks=ranks, events=[Event(1.0, "link_up")] * EVENTS_MAX)

    station = Station(FakeClock(1000.3), Scripted("training", crowd))
    station.loop.run_once()
    (frame,) = station.frames
    assert (len(frame.ranks), len(frame.events)) == (RANKS_MAX, EVENTS_MAX)
    # The sample before the first tick brought as many events again, and the agent's start is one more.
    assert station.drops.snapshot() == {"ranks_over_limit": 3, "events_over_limit": EVENTS_MAX + 1}


def test_a_collector_that_never_answers_costs_only_itself() -> None:
    release = threading.Event()

    def hang() -> Observed:
        release.wait(10)
        return node_row()

    drops = Drops()
    runner = CollectorRunner(Scripted("nvml", hang), drops, time.monotonic)
    runner.start_collection(1.0)
    assert runner.answer(0.01) == Observed()
    runner.start_collection(2.0)
    assert runner.answer(0.01) == Observed()
    assert runner.state == "failed: no answer for 0 s"
    release.set()
    until(lambda: not runner._answers.empty())
    runner.start_collection(3.0)
    assert runner.answer(5.0) == node_row()
    assert runner.state == "ok"
    assert drops.snapshot() == {"collector_late_nvml": 1}
    runner.close()


def test_a_fast_collector_is_not_charged_with_the_time_of_a_slow_one() -> None:
    begun, release = threading.Event(), threading.Event()

    def slow() -> Observed:
        begun.set()
        release.wait(10)
        return Observed()

    runners = [
        CollectorRunner(Scripted(name, collect), Drops(), time.monotonic)
        for name, collect in (("a", slow), ("b", Observed))
    ]
    for runner in runners:
        runner.start_collection(1.0)
    until(lambda: begun.is_set() and not runners[1]._answers.empty())
    time.sleep(0.2)
    release.set()
    for runner in runners:
        runner.answer(5.0)
        runner.close()
    assert runners[0].duration_s >= 0.2 > runners[1].duration_s


def test_events_of_an_answer_that_came_too_late_go_with_the_next() -> None:
    release = threading.Event()
    error = Event(1.0, "xid", 3, {"code": 79})

    def slow() -> Observed:
        release.wait(10)
        return Observed(events=[error])

    answers = iter([slow, node_row])

    def answer() -> Observed:
        return next(answers)()

    runner = CollectorRunner(Scripted("kernel_log", answer), Drops(), time.monotonic)
    runner.start_collection(1.0)
    assert runner.answer(0.01).events == []
    release.set()
    until(lambda: not runner._answers.empty())
    runner.start_collection(2.0)
    assert runner.answer(5.0).events == [error]
    runner.close()


def test_what_a_collector_could_not_see_is_said_beside_what_it_saw() -> None:
    runner = CollectorRunner(
        Scripted("nvml", lambda: Observed(node={}, problem="gpu 3: lost")), Drops(), time.monotonic
    )
    runner.start_collection(1.0)
    runner.answer(5.0)
    assert runner.state == "failed: gpu 3: lost"
    runner.close()


def test_a_wake_is_set_until_somebody_waited_for_it() -> None:
    wake = Wake()
    assert not wake.wait(0.0)
    wake.set()
    wake.set()
    assert wake.is_set()
    assert wake.wait(0.0)
    assert not wake.is_set()


def test_what_happened_before_the_first_tick_is_in_the_first_frame() -> None:
    news = [Observed(events=[Event(1000.2, "xid", 0, {"code": 79})])]
    station = Station(FakeClock(1000.3), Scripted("kernel", lambda: news.pop() if news else Observed()))
    assert [event.kind for event in station.run(1)[0].events] == ["agent_start", "xid"]


def test_each_tick_is_shown_with_all_its_events_and_how_the_collectors_fare() -> None:
    gone = Scripted("fabric", failing(Unsupported("no port")))
    bad = Scripted("nvml", failing(CollectFailed("gpu 3: lost")))
    station = Station(FakeClock(1000.3), Scripted("host", node_row), gone, bad)
    frames = station.run(2)
    assert [each.time_s for each in station.shown] == [frame.time_s for frame in frames[:2]]
    assert [event.kind for event in station.shown[0].events] == ["agent_start"]
    assert station.shown[0].seen.node == {"node_memory_used_ratio": 0.5}
    assert station.shown[1].frames == 2
    host, fabric, nvml = station.shown[1].collectors
    assert (host.ok, host.supported, host.failures) == (True, True, 0)
    assert (fabric.ok, fabric.supported, fabric.failures) == (False, False, 0)
    assert (nvml.ok, nvml.supported, nvml.failures) == (False, True, 3)  # the sample before the first tick counts


def test_a_single_frame_waits_for_a_slow_driver() -> None:
    def slow() -> Observed:
        time.sleep(0.5)
        return node_row()

    station = Station(FakeClock(1000.3), Scripted("nvml", slow), interval_s=0.2)
    station.loop.run_once()
    assert [each.collectors for each in station.frames] == [{"nvml": "ok"}]
