from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Block, encode_frame, encode_request
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.history.embedded_history import HISTORY_FILE, EmbeddedHistory
from eagle_eye.server.history.journal import Journal
from eagle_eye.server.history.settings import HistorySettings
from tests.server.builders import NOW, FakeClock, Running, acknowledged, body, frame, replayed, running
from tests.server.test_journal import fill_the_disk


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path, ingest__nodes=["n*"], ingest__body_bytes_max=100_000) as started:
        yield started


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all requests that change nothing."""
    with running(tmp_path_factory.mktemp("refusing"), ingest__nodes=["n*"], ingest__body_bytes_max=100_000) as started:
        yield started


def test_frames_are_acknowledged_observed_and_durable(server: Running, tmp_path: Path) -> None:
    answer = server.send(body(frame(1), frame(2)))
    assert answer.status_code == 200
    assert acknowledged(answer) == {"accepted": 2, "duplicates": 0, "watermark": 2}
    assert [(seen.sequence, received_s, offset_s) for seen, received_s, offset_s in server.watcher.frames] == [
        (1, NOW, 0.0),
        (2, NOW, 0.0),
    ]
    assert server.metric("ingest_frames_total") == 2
    assert server.client.get("/api/v1/nodes").json()["items"][0]["node"] == "n1"


def test_a_repeated_request_is_answered_alike_and_observed_once(server: Running) -> None:
    server.send(body(frame(1)))
    assert acknowledged(server.send(body(frame(1)))) == {"accepted": 0, "duplicates": 1, "watermark": 1}
    assert len(server.watcher.frames) == 1
    assert server.metric("ingest_duplicates_total") == 1


def test_frames_of_a_clock_that_is_off_reach_the_watcher_corrected(server: Running) -> None:
    late = frame(1, time_s=NOW - 3600, events=[Event(NOW - 3601, "agent_start")])
    server.send(body(late, sent_s=NOW - 3600))
    seen, _, offset_s = server.watcher.frames[0]
    assert offset_s == pytest.approx(3600.0)
    assert seen.time_s == pytest.approx(NOW)
    assert seen.events[0].time_s == pytest.approx(NOW - 1)


def raw(**more: Any) -> bytes:
    """A request with one frame of which some fields are replaced, unchecked."""
    fields = {**msgspec.msgpack.decode(encode_frame(frame())), **more}
    return encode_request([msgspec.msgpack.encode(fields)], NOW)


def envelope(**more: Any) -> bytes:
    fields = {"version": 1, "sent_s": NOW, "frames": [msgspec.Raw(encode_frame(frame()))]}
    return msgspec.msgpack.encode({**fields, **more})


BAD: list[tuple[str, bytes, int, str]] = [
    ("no MessagePack", b"\xc1", 400, "truncated"),
    ("an empty body", b"", 400, "truncated"),
    ("JSON", b'{"version": 1}', 400, "truncated"),
    ("truncated request", body(frame())[:-5], 400, "truncated"),
    ("truncated frame", encode_request([msgspec.msgpack.encode({"version": 1})], NOW), 400, "truncated"),
    ("unknown version of the request", envelope(version=2), 400, "version"),
    ("unknown version of a frame", raw(version=2), 400, "version"),
    ("no frames", envelope(frames=[]), 400, "empty"),
    ("NaN as sending time", envelope(sent_s=math.nan), 400, "time"),
    ("NaN as time", raw(time_s=math.nan), 400, "time"),
    ("infinite time", raw(time_s=math.inf), 400, "time"),
    ("negative time", raw(time_s=-1.0), 400, "time"),
    ("NaN as interval", raw(interval_s=math.nan), 400, "time"),
    ("a time beyond the year 10000", raw(time_s=253_402_300_800.0), 400, "time"),
    ("a clock's base that is no number", raw(clock_base_s=math.nan), 400, "time"),
    ("NaN as an event's time", body(frame(events=[Event(math.nan, "agent_start")])), 400, "time"),
    ("sequence 0", raw(sequence=0), 400, "shape"),
    ("empty node", raw(node=""), 400, "name"),
    ("control characters in the node", raw(node="n\x1b[2J"), 400, "name"),
    ("a node as long as a book", raw(node="n" * 1000), 400, "name"),
    ("a node's metric", body(frame(blocks=[Block(Scope.DEVICE, [0], ["node_iowait_ratio"], bytes(8))])), 400, "metric"),
    (
        "values of the wrong size",
        body(frame(blocks=[Block(Scope.DEVICE, [0], ["gpu_power_watts"], bytes(7))])),
        400,
        "shape",
    ),
    ("an event of a list", body(frame(events=[Event(NOW, "xid", 0, {"code": [79]})])), 400, "event"),
    ("a second frame that is bad", encode_request([encode_frame(frame()), b"\x80"], NOW), 400, "truncated"),
    ("two nodes in one request", body(frame(1), frame(2, node="n2")), 400, "mixed"),
    ("too many frames", envelope(frames=[msgspec.Raw(b"\x80")] * 1025), 413, "oversized"),
    ("a body beyond the limit", bytes(100_001), 413, "oversized"),
    ("a node outside ingest.nodes", body(frame(node="x1")), 403, "node"),
]


@pytest.mark.parametrize(("content", "status", "reason"), [pytest.param(*c[1:], id=c[0]) for c in BAD])
def test_a_bad_request_is_refused_whole_counted_and_changes_nothing(
    refusing: Running, content: bytes, status: int, reason: str
) -> None:
    before = refusing.metric("ingest_rejected_total", reason=reason)
    answer = refusing.send(content)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (problem["status"], problem["reason"]) == (status, reason)
    assert problem["type"] == f"urn:eagle-eye:problem:{reason}"
    assert len(problem["detail"]) > 10
    assert refusing.metric("ingest_rejected_total", reason=reason) == before + 1
    assert refusing.metric("ingest_frames_total") == 0
    assert refusing.watcher.frames == []
    assert refusing.client.get("/api/v1/nodes").json()["items"] == []
    assert refusing.dispatcher.services.history.streams() == []


def test_a_bad_frame_is_named_by_its_index(server: Running) -> None:
    answer = server.send(encode_request([encode_frame(frame()), b"\x80"], NOW))
    assert answer.json()["detail"].startswith("frame 1: ")


@pytest.mark.parametrize("kind", ["application/json", "", "application/msgpack"])
def test_another_content_type_is_refused(server: Running, kind: str) -> None:
    answer = server.client.post("/api/v1/frames", content=body(frame()), headers={"content-type": kind})
    assert (answer.status_code, answer.json()["reason"]) == (415, "content_type")


def test_a_compressed_body_is_refused(server: Running) -> None:
    answer = server.send(body(frame()), content_encoding="gzip")
    assert (answer.status_code, answer.json()["reason"]) == (415, "content_encoding")


def test_other_methods_are_refused(server: Running) -> None:
    answer = server.client.get("/api/v1/frames")
    assert (answer.status_code, answer.headers["allow"]) == (405, "OPTIONS, POST")


def test_a_body_without_announced_length_is_limited_while_it_is_read(server: Running) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(1000):
            yield bytes(10_000)

    try:
        answer = server.client.post(
            "/api/v1/frames", content=endless(), headers={"content-type": "application/x-eagle-eye-frames"}
        )
    except httpx.TransportError:
        # The server may close before it is told everything; what counts is that it read no further.
        pass
    else:
        assert answer.status_code == 413
    assert server.metric("ingest_rejected_total", reason="oversized") == 1


def test_a_body_that_does_not_arrive_is_given_up(tmp_path: Path) -> None:
    never = threading.Event()

    def slow() -> Iterator[bytes]:
        yield b"\x83"
        never.wait(3.0)
        yield b""

    with running(tmp_path, ingest__body_timeout_s=0.2) as server:
        answer = server.client.post(
            "/api/v1/frames", content=slow(), headers={"content-type": "application/x-eagle-eye-frames"}
        )
        assert (answer.status_code, answer.json()["reason"]) == (408, "slow")


def test_nodes_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    with running(tmp_path, ingest__nodes_max=1) as server:
        assert server.send(body(frame(1))).status_code == 200
        answer = server.send(body(frame(1, node="n2")))
        assert (answer.status_code, answer.json()["reason"]) == (403, "too_many_nodes")
        assert server.send(body(frame(2))).status_code == 200


def test_a_full_disk_is_503_with_retry_after_unready_and_recovered_from(server: Running) -> None:
    server.send(body(frame(1)))
    kept = server.dispatcher.services.history
    assert isinstance(kept, EmbeddedHistory)
    journal = kept.journal
    fill_the_disk(journal)
    many = body(*(frame(sequence) for sequence in range(2, 150)))
    answer = server.send(many)
    assert (answer.status_code, answer.json()["reason"], answer.headers["retry-after"]) == (503, "storage", "5")
    ready = server.client.get("/readyz")
    assert ready.status_code == 503
    assert "full" in ready.json()["checks"]["storage"]
    assert len(server.watcher.frames) == 1
    journal._writer.execute("PRAGMA max_page_count = 1000000")
    assert server.send(many).json()["watermark"] == 149
    assert server.client.get("/readyz").status_code == 200


def test_frames_of_before_a_restart_reach_the_watcher_again(tmp_path: Path) -> None:
    clock = FakeClock()
    with running(tmp_path, clock) as server:
        server.send(body(frame(1), frame(2)))
    clock.advance(60)
    with running(tmp_path, clock) as server:
        assert [(seen.sequence, received_s) for seen, received_s in server.watcher.recovered] == [(1, NOW), (2, NOW)]
        assert server.send(body(frame(2), sent_s=clock.now_s())).json()["duplicates"] == 1
    clock.advance(10_000)
    with running(tmp_path, clock) as server:
        assert server.watcher.recovered == []


def mutated(whole: bytes, at: int, junk: bytes) -> bytes:
    return whole[: at % len(whole)] + junk + whole[at % len(whole) + len(junk) :]


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
bodies = (
    st.binary(max_size=300)
    | st.builds(mutated, st.just(body(frame())), st.integers(0, 10_000), st.binary(min_size=1, max_size=9))
    | anything.map(msgspec.msgpack.encode)
    | st.builds(lambda value: envelope(frames=[msgspec.Raw(msgspec.msgpack.encode(value))]), anything)
    | st.builds(lambda name, value: raw(**{name: value}), st.sampled_from(frame().__struct_fields__), anything)
    | st.builds(lambda name, value: body(frame(events=[Event(NOW, "xid", 0, {name: value})])), st.text(), anything)
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("fuzz")) as started:
        yield started


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(content=bodies)
def test_no_body_makes_the_server_fail(shared: Running, content: bytes) -> None:
    answer = shared.send(content)
    assert answer.status_code in (200, 400, 413)
    if answer.status_code != 200:
        assert answer.json()["reason"] != "internal"


def test_depth_does_not_make_the_server_fail(shared: Running) -> None:
    deep = b"\x91" * 50_000 + b"\xc0"
    for content in (deep, envelope(frames=[msgspec.Raw(deep)])):
        assert shared.send(content).status_code == 400


def open_journal(folder: Path, clock: FakeClock, look: Callable[[Journal], Any]) -> Any:
    journal = Journal(folder / HISTORY_FILE, HistorySettings(), 1 << 20, clock)
    try:
        return look(journal)
    finally:
        journal.close()


def test_the_history_keeps_the_bytes_as_they_came(tmp_path: Path) -> None:
    clock = FakeClock()
    with running(tmp_path, clock) as server:
        server.send(body(frame(1, time_s=NOW - 50), sent_s=NOW - 50))
    (recorded,) = open_journal(tmp_path, clock, lambda journal: replayed(journal.reader, 0.0, 10))
    assert recorded.frame == frame(1, time_s=NOW - 50)
    assert recorded.offset_s == pytest.approx(50.0)
