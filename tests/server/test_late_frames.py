"""Frames that an agent kept while the server was away and sends after newer ones: for the history, no news."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Frame, Rank
from eagle_eye.server.engine.engine import Engine
from eagle_eye.server.engine.settings import DetectionSettings
from eagle_eye.server.history.history import Appended
from eagle_eye.server.ingest.decoding import LATE_AT_ONCE_MAX
from eagle_eye.server.model.batch import Batch
from tests.server.builders import NOW, Running, acknowledged, body, frame, running

BEFORE = NOW - 1800
GONE = Event(BEFORE, "gpu_lost", 0, {"uuid": "GPU-1"})
ENDED = Event(BEFORE, "process_exit", 0, {"exit_code": 1, "rank": 0, "pid": 9, "job": "job", "attempt": 0})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as started:
        yield started


def old(sequence: int = 1, **more: Any) -> Frame:
    return frame(sequence, time_s=BEFORE + sequence - 1, stream="old", **more)


def told(server: Running) -> list[tuple[str, int]]:
    return [(seen.stream, seen.sequence) for seen, _, _ in server.watcher.frames]


def test_a_late_frame_is_durable_and_acknowledged_but_not_shown_to_the_detection_loop(server: Running) -> None:
    server.send(body(frame(1)))
    assert acknowledged(server.send(body(old(1), old(2)))) == {"accepted": 2, "duplicates": 0, "watermark": 2}
    assert told(server) == [("stream-n1", 1)]
    assert server.metric("ingest_late_frames_total") == 2
    kept = server.dispatcher.services.history.query(["n1"], BEFORE - 1, NOW + 1)
    assert [recorded.frame.stream for recorded in kept] == ["old", "old", "stream-n1"]


def test_a_late_frame_is_no_news_of_its_node(server: Running) -> None:
    server.send(body(frame(1, collectors={"nvml": "ok"}, ranks=[Rank("job", 0, 1, 0, silent_s=7.0)])))
    before = server.dispatcher.services.fleet.last("n1")
    server.send(body(old(1, collectors={"nvml": "failed: no"}, ranks=[Rank("other", 0, 1, 0)], boot_id="b")))
    assert server.dispatcher.services.fleet.last("n1") == before


def test_frames_that_come_in_order_are_news_however_old_they_are(server: Running) -> None:
    # As an agent sends that has one queue: the oldest first, after an outage of the server.
    server.send(body(*(old(sequence) for sequence in range(1, 4))))
    server.send(body(*(old(sequence) for sequence in range(4, 6)), frame(6, stream="old")))
    assert [sequence for _, sequence in told(server)] == [1, 2, 3, 4, 5, 6]


def test_a_clock_that_was_set_back_makes_nothing_late(server: Running) -> None:
    server.send(body(frame(1)))
    server.send(body(frame(2, time_s=NOW - 3600), sent_s=NOW - 3600))
    server.send(body(frame(3, time_s=NOW - 3599), sent_s=NOW - 3599))
    assert [sequence for _, sequence in told(server)] == [1, 2, 3]


def test_a_frame_that_overtook_another_by_little_makes_it_not_late(server: Running) -> None:
    server.send(body(frame(2)))
    server.send(body(frame(1, time_s=NOW - 9.0)))
    assert [sequence for _, sequence in told(server)] == [2, 1]


def test_of_a_late_frame_the_loop_is_told_the_facts_that_stay_true_by_its_node_as_it_is_now(server: Running) -> None:
    ranks = [Rank("job", 0, 1, 0, silent_s=3.0)]
    server.send(body(frame(1, ranks=ranks, collectors={"evidence": "ok"})))
    server.send(body(old(1, events=[GONE, Event(BEFORE, "phase", 0, {"name": "eval"}), Event(BEFORE, "agent_stop")])))
    seen, received_s, _ = server.watcher.frames[-1]
    assert seen == old(1, ranks=ranks, collectors={"evidence": "ok"}, blocks=[], events=[GONE])
    assert received_s == server.watcher.frames[0][1]


def test_a_late_fact_is_not_held_against_an_attempt_that_began_after_it(server: Running) -> None:
    server.send(body(frame(1, ranks=[Rank("job", 0, 1, 0, attempt=1)])))
    server.send(body(old(1, events=[GONE, ENDED])))
    # What says its attempt may be told: the engine compares it.
    assert server.watcher.frames[-1][0].events == [ENDED]


def test_nothing_late_is_reported_a_node_that_said_goodbye(server: Running) -> None:
    server.send(body(frame(1, events=[Event(NOW, "agent_stop")])))
    server.send(body(old(1, events=[GONE])))
    assert told(server) == [("stream-n1", 1)]


def test_an_hour_of_late_frames_leaves_the_engine_as_it_was_but_for_the_facts(server: Running) -> None:
    live = frame(1, ranks=[Rank("job", 0, 1, 0, silent_s=4.0)])
    server.send(body(live))
    fell_silent = [Rank("job", 0, 1, 0, silent_s=900.0)]
    late = [old(sequence, ranks=fell_silent, interval_s=60.0) for sequence in range(1, 60)]
    server.send(body(*late, old(60, events=[GONE, Event(BEFORE, "agent_stop")])))
    engine = Engine(DetectionSettings(), watching_since_s=NOW - 10)
    windows = []
    for seen, received_s, _ in server.watcher.frames:
        engine.observe(seen, received_s)
        (track,) = engine.tracks()
        windows.append(engine.window(track, NOW, NOW - 10))
    first, last = windows[0], windows[-1]
    assert [event.kind for event in last.events] == ["gpu_lost"]
    assert windows[-1].heard_s.tolist() == [NOW]
    assert (last.times_s == first.times_s).all()
    assert (last.silent_s == first.silent_s).all()
    assert (last.farewell == first.farewell).all()
    assert last.interval_s == first.interval_s
    assert engine.drops() == {"stale_attempt": 0, "not_member": 0, "late_row": 0, "event_overflow": 0}


def test_late_frames_are_kept_few_requests_at_a_time_and_no_live_one_is_refused_for_them(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(LATE_AT_ONCE_MAX + 2):
        server.send(body(frame(1, node=f"n{number}")))
    history = server.dispatcher.services.history
    submit, held = history.submit, list[tuple[Batch, Future[Appended]]]()

    def hold(batch: Batch) -> Future[Appended]:
        if {stream for _, stream in (ref.name for ref in batch.refs)} != {"old"}:
            return submit(batch)
        held.append((batch, Future()))
        return held[-1][1]

    monkeypatch.setattr(history, "submit", hold)

    async def send_all() -> tuple[list[httpx.Response], httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=10.0, trust_env=False) as client:

            async def post(one: Frame) -> httpx.Response:
                kind = {"content-type": "application/x-eagle-eye-frames"}
                return await client.post("/api/v1/frames", content=body(one), headers=kind)

            late = [asyncio.create_task(post(old(1, node=f"n{n}"))) for n in range(LATE_AT_ONCE_MAX + 1)]
            await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)  # the one that is refused
            live = asyncio.create_task(post(frame(2, node="n0", time_s=NOW + 1)))
            while any(not future.done() for _, future in held) or not live.done():
                for batch, future in held:
                    if not future.done():
                        future.set_result(submit(batch).result(10.0))
                await asyncio.sleep(0.01)
            return await asyncio.gather(*late), live.result()

    late, live = asyncio.run(send_all())
    assert live.status_code == 200
    assert sorted(answer.status_code for answer in late) == [200] * LATE_AT_ONCE_MAX + [503]
    refused = next(answer for answer in late if answer.status_code == 503)
    assert (refused.json()["reason"], refused.headers["retry-after"]) == ("busy", "1")


def test_after_a_restart_late_frames_are_not_shown_again(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.send(body(frame(1)))
        server.send(body(old(1), old(2)))
        server.send(body(frame(2, time_s=NOW + 1), sent_s=NOW + 1))
    with running(tmp_path) as server:
        assert [seen.stream for seen, _ in server.watcher.recovered] == ["stream-n1"] * 2
        assert server.dispatcher.services.fleet.last("n1").time_s == NOW + 1  # type: ignore[union-attr]
