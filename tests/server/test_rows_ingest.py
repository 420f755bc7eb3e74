"""Frames as rows, taken off the socket at once (``plain``) or the long way: the answers are the same."""

from __future__ import annotations

import http.client
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Block, Frame, block, encode_frame
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.rows import (
    CONTENT_TYPE,
    encode_row,
    encode_rows_request,
    encode_template,
    template_id,
    template_of,
)
from eagle_eye.server.ingest.frames import group_every_s
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, FakeClock, Running, acknowledged, frame, running

WAYS = ("plain", "long")


@pytest.mark.parametrize(
    ("rows", "took_s", "alone_s", "of_several_s"),
    [(20, 0.08, 0.0, 0.0), (72, 0.08, 0.08, 0.2), (144, 0.08, 0.08, 1 / 6), (1_000, 0.08, 0.08, 0.08)],
)
def test_each_of_several_cells_waits_for_more_rows_but_for_no_more_than_a_fifth_of_a_second(
    rows: int, took_s: float, alone_s: float, of_several_s: float
) -> None:
    found = [group_every_s(rows, took_s, several=several) for several in (False, True)]
    assert found == pytest.approx([alone_s, of_several_s])


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def server(tmp_path: Path, clock: FakeClock) -> Iterator[Running]:
    with running(tmp_path, clock, ingest__nodes=["n*"], ingest__body_bytes_max=100_000) as started:
        yield started


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all requests that change nothing."""
    with running(tmp_path_factory.mktemp("refusing"), ingest__nodes=["n*"], ingest__body_bytes_max=100_000) as started:
        yield started


def request(*frames: Frame, templates: bool = True, sent_s: float = NOW) -> bytes:
    """Return a body with the frames as rows, and with their templates."""
    known: dict[bytes, bytes] = {}
    rows = []
    for one in frames:
        template = template_of(one)
        raw = encode_template(template)
        known[template_id(raw)] = raw
        rows.append(encode_row(one, template, template_id(raw)))
    return encode_rows_request(list(known.values()) if templates else [], rows, sent_s)


def post(server: Running, content: bytes, way: str = "plain", **headers: str) -> httpx.Response:
    more = {"x-way": "long"} if way == "long" else {}
    kind = {"content-type": CONTENT_TYPE, **more, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return server.client.post("/api/v1/frames", content=content, headers=kind)


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_acknowledged_observed_and_durable(server: Running, way: str) -> None:
    answer = post(server, request(frame(1), frame(2)), way)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert "date" in answer.headers
    assert acknowledged(answer) == {"accepted": 2, "duplicates": 0, "watermark": 2}
    power = [seen.blocks[0] for seen, _, _ in server.watcher.frames]
    assert power == [block(Scope.DEVICE, {0: {"gpu_power_watts": 100.0 + n}}) for n in (1, 2)]
    assert server.metric("ingest_frames_total") == 2
    assert server.client.get("/api/v1/nodes").json()["items"][0]["node"] == "n1"
    recorded = list(server.dispatcher.services.history.query(["n1"], 0.0, 4e9))
    assert [one.frame for one in recorded] == [frame(1), frame(2)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_a_node_whose_job_another_cell_judges_is_told_where_to_go_and_taken_if_it_comes_again(
    server: Running, way: str, known: bool
) -> None:
    if known:
        assert post(server, request(frame(1)), way).status_code == 200
    server.dispatcher.taker.rows._elsewhere["n1"] = "http://west:8470"
    answer = post(server, request(frame(2), templates=not known), way)
    assert (answer.status_code, answer.json()["reason"]) == (503, "standby")
    assert answer.headers["eagle-eye-leader"] == answer.headers["eagle-eye-cell-leader"] == "http://west:8470"
    assert server.metric("ingest_rejected_total", reason="standby") == 1
    assert post(server, request(frame(2), templates=not known), way).status_code == 200


@pytest.mark.parametrize("way", WAYS)
def test_a_template_is_said_once_and_known_after_a_restart(tmp_path: Path, way: str) -> None:
    with running(tmp_path) as server:
        refused = post(server, request(frame(1), templates=False), way)
        assert (refused.status_code, refused.json()["reason"]) == (409, "outline")
        assert post(server, request(frame(1)), way).status_code == 200
        assert post(server, request(frame(2), templates=False), way).json()["watermark"] == 2
    with running(tmp_path) as server:
        assert post(server, request(frame(3), templates=False), way).json()["watermark"] == 3


def test_a_repeated_row_is_answered_alike_and_observed_once(server: Running) -> None:
    post(server, request(frame(1)))
    assert acknowledged(post(server, request(frame(1)))) == {"accepted": 0, "duplicates": 1, "watermark": 1}
    assert len(server.watcher.frames) == 1
    assert server.metric("ingest_duplicates_total") == 1


def test_rows_with_more_than_numbers_and_whole_frames_come_in_their_order(server: Running) -> None:
    told = frame(2, events=[Event(NOW, "xid", 0, {"code": 79})])
    whole = frame(3, blocks=[], events=[Event(NOW, "agent_stop")])
    rows = request(frame(1), told)
    body = encode_rows_request([_template(frame(1))], [_row(frame(1)), _row(told), encode_frame(whole)], NOW)
    assert len(body) > len(rows)
    assert post(server, body).json()["accepted"] == 3
    assert [[event.kind for event in seen.events] for seen, _, _ in server.watcher.frames] == [
        [],
        ["xid"],
        ["agent_stop"],
    ]
    heard = server.dispatcher.services.fleet.last("n1")
    assert heard is not None
    assert heard.farewell


def test_rows_of_a_clock_that_is_off_reach_the_watcher_corrected(server: Running) -> None:
    post(server, request(frame(1, time_s=NOW - 3600), sent_s=NOW - 3600))
    seen, _, _ = server.watcher.frames[0]
    assert seen.time_s == pytest.approx(NOW)


def placed(server: Running) -> list[float]:
    """Return where the rows that the watcher got are, in seconds after NOW."""
    return [seen.time_s - NOW for seen, _, _ in server.watcher.frames]


@pytest.mark.parametrize("base", [True, False])
def test_rows_of_a_clock_that_is_set_are_placed_by_the_clock_that_it_is(server: Running, base: bool) -> None:
    for sequence, ahead_s in enumerate([3600.0, 3600.0, 0.0, 0.0, -3600.0, -3600.0], 1):
        more: dict[str, Any] = {"clock_base_s": ahead_s} if base else {}
        one = request(frame(sequence, time_s=NOW + ahead_s, **more), sent_s=NOW + ahead_s, templates=sequence % 2 == 1)
        assert post(server, one).json()["accepted"] == 1
    assert placed(server) == [0.0] * 6
    assert server.metric("agent_clock_steps_total", seen_by="agent" if base else "server") == 2
    kept = server.dispatcher.services.history.query(["n1"], NOW - 1, NOW + 1)
    assert [one.frame.sequence for one in kept] == [1, 2, 3, 4, 5, 6]


def test_rows_of_the_future_are_taken_placed_at_their_receipt_and_counted(server: Running) -> None:
    rows = [frame(1, time_s=NOW + 999), frame(2, time_s=NOW + 1_000)]
    assert acknowledged(post(server, request(*rows))) == {"accepted": 2, "duplicates": 0, "watermark": 2}
    assert placed(server) == [-1.0, 0.0]
    assert server.metric("ingest_moved_times_total", of="frame") == 2


def test_late_rows_are_kept_and_no_news(server: Running) -> None:
    post(server, request(frame(5, time_s=NOW)))
    old = frame(1, stream="earlier", time_s=NOW - 600, events=[Event(NOW - 600, "xid", 0, {"code": 79})])
    assert post(server, request(old, sent_s=NOW)).json()["accepted"] == 1
    told = server.watcher.frames[-1][0]
    assert ([event.kind for event in told.events], told.blocks) == (["xid"], [])
    assert server.metric("ingest_late_frames_total") == 1
    assert server.dispatcher.services.fleet.last("n1") is not None
    assert server.dispatcher.services.fleet.last("n1").time_s == NOW  # type: ignore[union-attr]


def test_a_durable_row_of_a_new_node_is_acknowledged_when_the_node_cannot_be_recorded(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise StoreUnavailable("no records")

    monkeypatch.setattr(server.dispatcher.services.store, "update", fail)
    assert acknowledged(post(server, request(frame(1)))) == {"accepted": 1, "duplicates": 0, "watermark": 1}
    assert server.metric("internal_errors_total", place="node") == 1


@pytest.mark.parametrize("known", [False, True])
def test_a_durable_row_is_acknowledged_when_requests_to_agents_cannot_be_looked_up(
    server: Running, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    if known:
        post(server, request(frame(1)))

    def fail() -> bool:
        raise RuntimeError("no records")

    monkeypatch.setattr(server.dispatcher.services.evidence_requests, "has_requests", fail)
    server.client.timeout = 3.0
    answer = post(server, request(frame(2), templates=not known))
    assert acknowledged(answer) == {"accepted": 1, "duplicates": 0, "watermark": 2}
    assert server.metric("internal_errors_total", place="requests") == 1


def test_what_a_newer_agent_sends_is_left_out_and_named(server: Running) -> None:
    values = block(Scope.DEVICE, {0: {"gpu_power_watts": 5.0}}).values * 2
    newer = frame(1, blocks=[Block(Scope.DEVICE, [0], ["gpu_mood", "gpu_power_watts"], values)])
    answer = post(server, request(newer)).json()
    assert (answer["accepted"], answer["unknown"]) == (1, ["metric gpu_mood"])
    assert server.metric("ingest_unknown_total", kind="metric") == 1
    assert server.watcher.frames[0][0].blocks == [block(Scope.DEVICE, {0: {"gpu_power_watts": 5.0}})]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"", 400, "truncated"),
        (b"garbage that is longer than a head", 400, "version"),
        (encode_rows_request([], [], NOW), 400, "empty"),
        (encode_rows_request([], [b""], NOW), 400, "truncated"),
        (encode_rows_request([b"\xc1"], [b"\2"], NOW), 400, "truncated"),
        (request(frame(1), frame(2, node="n2")), 400, "mixed"),
        (request(frame(1, time_s=float("inf"))), 400, "time"),
        (request(frame(1), sent_s=-1.0), 400, "time"),
        (request(frame(1, node="stranger")), 403, "node"),
        (request(frame(1))[:-1], 400, "truncated"),
    ],
)
def test_a_bad_request_is_refused_alike_both_ways(
    refusing: Running, body: bytes, status: int, reason: str, way: str
) -> None:
    before = refusing.metric("ingest_rejected_total", reason=reason)
    answer = post(refusing, body, way)
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, answer.json()["reason"]) == (status, reason)
    assert refusing.metric("ingest_rejected_total", reason=reason) == before + 1


def test_a_compressed_request_is_read_up_to_the_limit(server: Running) -> None:
    body = request(*(frame(n) for n in range(1, 40)))
    assert post(server, zlib.compress(body), content_encoding="deflate").json()["accepted"] == 39
    bomb = post(server, zlib.compress(bytes(1 << 20)), content_encoding="deflate")
    assert (bomb.status_code, bomb.json()["reason"]) == (413, "oversized")
    cut = post(server, zlib.compress(body)[:-5], content_encoding="deflate")
    assert (cut.status_code, cut.json()["reason"]) == (400, "truncated")
    unpacked = post(server, body, content_encoding="deflate")
    assert (unpacked.status_code, unpacked.json()["reason"]) == (400, "truncated")


def test_a_token_speaks_for_its_node_and_no_longer_than_it_lives(server: Running) -> None:
    services = server.dispatcher.services
    text, token = mint("agent", "n1", services.clock.now_s(), None)
    services.store.commit(Change(tokens=(token,)))
    said = {"authorization": f"Bearer {text}"}
    assert post(server, request(frame(1)), **said).status_code == 200
    assert post(server, request(frame(2), templates=False), **said).status_code == 200
    other = post(server, request(frame(1, node="n2")), **said)
    assert (other.status_code, other.json()["reason"]) == (403, "node")
    assert post(server, request(frame(3))).status_code == 401
    services.store.commit(Change(tokens=(msgspec.structs.replace(token, revoked=True),)))
    assert post(server, request(frame(3)), **said).status_code == 401


def test_too_many_requests_of_one_token_are_refused(tmp_path: Path) -> None:
    with running(tmp_path, limits__agent_requests_per_s=0.001, limits__agent_burst=2) as server:
        text, token = mint("agent", "n1", NOW, None)
        server.dispatcher.services.store.commit(Change(tokens=(token,)))
        said = {"authorization": f"Bearer {text}"}
        statuses = [post(server, request(frame(n)), **said).status_code for n in (1, 2, 3)]
        assert statuses == [200, 200, 429]


def raw_head(body: bytes, *more: str) -> bytes:
    lines = (
        "POST /api/v1/frames HTTP/1.1",
        "Host: 127.0.0.1",
        f"Content-Type: {CONTENT_TYPE}",
        *more,
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


@pytest.fixture
def wire(server: Running) -> Iterator[socket.socket]:
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=5.0) as opened:
        yield opened


def answers(wire: socket.socket, count: int) -> list[int]:
    found = []
    for _ in range(count):
        answer = http.client.HTTPResponse(wire)
        answer.begin()
        answer.read()
        found.append(answer.status)
    return found


@pytest.mark.parametrize("pieces", [1, 2, 7, 50])
def test_a_request_may_come_in_pieces(wire: socket.socket, server: Running, pieces: int) -> None:
    body = request(frame(1))
    whole = raw_head(body) + body
    step = -(-len(whole) // pieces)
    for at in range(0, len(whole), step):
        wire.sendall(whole[at : at + step])
        time.sleep(0.002)
    assert answers(wire, 1) == [200]
    assert len(server.watcher.frames) == 1


def test_requests_that_come_before_the_answer_are_answered_in_order(wire: socket.socket, server: Running) -> None:
    bodies = [request(frame(n)) for n in range(1, 5)]
    wire.sendall(b"".join(raw_head(body) + body for body in bodies))
    received = b""
    while received.count(b'"watermark"') < len(bodies):
        received += wire.recv(1 << 16)
    assert [f'"watermark":{n}'.encode() in received for n in range(1, 5)] == [True] * 4
    assert received.index(b'"watermark":1') < received.index(b'"watermark":4')
    assert len(server.watcher.frames) == 4


def test_other_requests_share_the_connection(wire: socket.socket) -> None:
    body = request(frame(1))
    for whole in (
        raw_head(body) + body,
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        raw_head(body, "X-Way: long") + body,
        raw_head(body) + body,
    ):
        wire.sendall(whole)
        assert answers(wire, 1) == [200]


def test_a_body_that_never_ends_is_given_up(tmp_path: Path) -> None:
    with running(tmp_path, ingest__body_timeout_s=0.2) as server:
        parts = urlsplit(server.url)
        with socket.create_connection((parts.hostname, parts.port), timeout=5.0) as wire:
            body = request(frame(1))
            wire.sendall(raw_head(body) + body[:-1])
            assert answers(wire, 1) == [408]


def test_a_head_that_says_two_lengths_is_refused(wire: socket.socket, server: Running) -> None:
    body = request(frame(1))
    wire.sendall(raw_head(body, "Content-Length: 5") + body)
    assert answers(wire, 1) == [400]
    assert server.watcher.frames == []


def test_many_senders_at_once_are_written_in_groups(server: Running) -> None:
    commits = server.dispatcher.services.history.journal.reader  # type: ignore[attr-defined]

    def send(node: str) -> None:
        parts = urlsplit(server.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
        for sequence in range(1, 6):
            body = request(frame(sequence, node))
            connection.request("POST", "/api/v1/frames", body, {"Content-Type": CONTENT_TYPE})
            answer = connection.getresponse()
            assert msgspec.json.decode(answer.read())["watermark"] == sequence
        connection.close()

    threads = [threading.Thread(target=send, args=(f"n{n}",)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.metric("ingest_frames_total") == 100
    assert len(commits.read("SELECT id FROM chunks", ())) < 50


def _template(one: Frame) -> bytes:
    return encode_template(template_of(one))


def _row(one: Frame) -> bytes:
    return encode_row(one, template_of(one), template_id(_template(one)))


class TestIdentity:
    """Two machines under one name and token: a cloned image."""

    @pytest.mark.parametrize("way", WAYS)
    def test_the_second_machine_is_refused_and_not_observed(self, server: Running, way: str) -> None:
        gone = Event(NOW, "xid", 0, {"code": 79})
        twin: dict[str, Any] = {"boot_id": "b2", "stream": "s2"}
        assert post(server, request(frame(1)), way).status_code == 200
        for one in (frame(1, **twin), frame(2, **twin, events=[gone])):
            answer = post(server, request(one), way)
            assert (answer.status_code, answer.json()["reason"]) == (403, "identity")
        assert post(server, request(frame(2)), way).status_code == 200
        assert [(seen.boot_id, seen.events) for seen, _, _ in server.watcher.frames] == [(frame(1).boot_id, [])] * 2

    @pytest.mark.parametrize("way", WAYS)
    def test_plain_rows_of_the_second_machine_are_refused(self, server: Running, clock: FakeClock, way: str) -> None:
        twin: dict[str, Any] = {"boot_id": "b2", "stream": "s2"}
        post(server, request(frame(1, **twin)), way)
        clock.advance(60.0)
        post(server, request(frame(1, time_s=NOW + 60), sent_s=NOW + 60), way)
        rows = request(frame(2, time_s=NOW + 60, **twin), templates=False, sent_s=NOW + 60)
        answer = post(server, rows, way)
        assert (answer.status_code, answer.json()["reason"]) == (403, "identity")

    def test_both_speaking_is_named(self, server: Running, clock: FakeClock) -> None:
        twin: dict[str, Any] = {"boot_id": "b2", "stream": "s2"}
        post(server, request(frame(1)))
        clock.advance(0.5)
        post(server, request(frame(1, **twin)))
        assert server.metric("nodes_disputed") == 0
        clock.advance(0.5)
        post(server, request(frame(2, time_s=NOW + 1), sent_s=NOW + 1))
        said = f"two machines report as n1: boot id is {frame(1).boot_id} and b2 by turns"
        assert said in server.client.get("/readyz").json()["notes"]["identity"]

    def test_a_booted_machine_is_taken_and_its_old_frames_too(self, server: Running, clock: FakeClock) -> None:
        post(server, request(frame(1)))
        clock.advance(60.0)
        booted: dict[str, Any] = {"boot_id": "b2", "stream": "s2", "time_s": NOW + 60}
        assert post(server, request(frame(1, **booted), sent_s=NOW + 60)).status_code == 200
        assert post(server, request(frame(2, time_s=NOW + 1), sent_s=NOW + 61)).status_code == 200
        assert server.metric("nodes_disputed") == 0

    def test_a_restarted_server_knows_who_was_there_first(self, tmp_path: Path, clock: FakeClock) -> None:
        with running(tmp_path / "data", clock) as server:
            assert post(server, request(frame(1))).status_code == 200
        clock.advance(120.0)
        with running(tmp_path / "data", clock) as server:
            twin = frame(1, time_s=NOW + 120, boot_id="b2", stream="s2")
            assert post(server, request(twin, sent_s=NOW + 120)).status_code == 403
            assert post(server, request(frame(2, time_s=NOW + 120), sent_s=NOW + 120)).status_code == 200
