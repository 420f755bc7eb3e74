"""A newer agent before an older server: what the server does not know is left out and named; nothing else is lost."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eagle_eye.agent.collector import Drops
from eagle_eye.agent.transport.servers import Servers
from eagle_eye.agent.transport.spool import Spool
from eagle_eye.agent.transport.uplink import Destination, Uplink
from eagle_eye.schema import metrics
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Block, encode_frame, encode_request, values_of
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.ingest import decoding as unknown_things
from tests.agent.fakes import FakeClock as AgentClock
from tests.server.builders import NOW, Running, acknowledged, frame, running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path / "server") as started:
        yield started


def newer(sequence: int = 1, stream: str = "s", **more: Any) -> bytes:
    """A frame with a metric, an event and a key that nobody knows yet, beside known ones."""
    known = frame(
        sequence,
        stream=stream,
        blocks=[Block(Scope.DEVICE, [0], ["gpu_mood", "gpu_power_watts"], struct.pack("<2d", 1, 2))],
        events=[Event(NOW, "party", 0), Event(NOW, "xid", 0, {"code": 79})],
    )
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(encode_frame(known)), "horoscope": "good", **more})


UNKNOWN = ["event party", "key frame.horoscope", "metric gpu_mood"]


def test_what_is_known_arrives_and_the_rest_is_named(server: Running) -> None:
    answer = acknowledged(server.send(encode_request([newer()], NOW)))
    assert answer == {"accepted": 1, "duplicates": 0, "watermark": 1, "unknown": UNKNOWN}
    ((seen, _, _),) = server.watcher.frames
    assert [(item.metrics, list(values_of(item))) for item in seen.blocks] == [(["gpu_power_watts"], [2.0])]
    assert [event.kind for event in seen.events] == ["xid"]


def test_each_thing_left_out_is_counted_and_logged_once(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    server.send(encode_request([newer(1), newer(2)], NOW))
    server.send(encode_request([newer(3)], NOW))
    counted = {kind: server.metric("ingest_unknown_total", kind=kind) for kind in ("metric", "event", "key")}
    assert counted == {"metric": 3, "event": 3, "key": 1}  # keys are looked for in a stream's first frame
    said = [record.getMessage() for record in caplog.records if record.name == unknown_things.__name__]
    assert len(said) == 3
    assert all(text.startswith("node n1 (agent '1.2') sends what this server does not know") for text in said)
    assert {text.rpartition(": ")[2] for text in said} == set(UNKNOWN)


def test_the_history_keeps_it_for_a_newer_server(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    server.send(encode_request([newer()], NOW))
    mood = metrics.MetricSpec("gpu_mood", "1", metrics.MetricKind.GAUGE, Scope.DEVICE, "How it feels.")
    monkeypatch.setattr(metrics, "BY_NAME", {**metrics.BY_NAME, mood.name: mood})
    (stored,) = server.dispatcher.services.history.query([], NOW - 60, NOW + 60)
    assert stored.frame.blocks[0].metrics == ["gpu_mood", "gpu_power_watts"]


def test_names_without_end_are_logged_and_answered_up_to_a_limit(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    for sequence in range(1, 5):
        party = [Event(NOW, f"party_{sequence}_{number}") for number in range(100)]
        answer = server.send(encode_request([encode_frame(frame(sequence, events=party))], NOW)).json()
        assert len(answer["unknown"]) == unknown_things.ANSWERED_MAX
    assert server.metric("ingest_unknown_total", kind="event") == 400
    assert len(caplog.records) == unknown_things.LOGGED_MAX


@pytest.mark.parametrize(("version", "older"), [(2, "server"), (0, "agent")])
def test_another_version_of_the_wire_is_refused_naming_both(server: Running, version: int, older: str) -> None:
    said = f"of wire version {version}; this server reads version 1: upgrade the {older}"
    bodies = [
        (encode_request([newer(version=version, blocks="elsewhere")], NOW), f"frame 0: the frame is {said}"),
        (msgspec.msgpack.encode({"version": version, "parcels": []}), f"the request: the request is {said}"),
    ]
    for body, detail in bodies:
        answer = server.send(body)
        assert (answer.status_code, answer.json()["reason"]) == (400, "version")
        assert answer.json()["detail"] == detail


def of_version(version: int) -> Callable[[str, int], bytes]:
    return lambda stream, sequence: newer(sequence, stream, version=version)


@pytest.fixture
def agent(server: Running, tmp_path: Path) -> Iterator[tuple[Uplink, Spool, Drops]]:
    drops = Drops()
    spool = Spool(tmp_path / "spool", "n1", drops)
    uplink = Uplink(Destination(Servers([server.url])), spool, drops, AgentClock(NOW), jitter=lambda: 1.0)
    yield uplink, spool, drops
    uplink.stop(0.0)
    spool.close()


def test_the_agent_says_once_what_an_older_server_leaves_out(
    agent: tuple[Uplink, Spool, Drops], caplog: pytest.LogCaptureFixture
) -> None:
    uplink, spool, drops = agent
    caplog.set_level(logging.WARNING, "eagle_eye.agent")
    for _ in range(2):
        spool.append(of_version(1))
        uplink.live.send_once()
    assert uplink.delivered == 2
    assert drops.snapshot() == {"unknown_to_server": 5}
    said = [record.getMessage() for record in caplog.records if record.name == "eagle_eye.agent"]
    assert [text.rpartition(": ")[2] for text in said] == [repr(name) for name in UNKNOWN]


def test_the_agent_keeps_its_frames_for_the_day_the_server_is_upgraded(
    agent: tuple[Uplink, Spool, Drops], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    uplink, spool, drops = agent
    monkeypatch.setattr("eagle_eye.agent.transport.uplink.WIRE_VERSION", 2)
    for _ in range(3):
        spool.append(of_version(2))
    assert [uplink.live.send_once() for _ in range(3)] == [60.0] * 3
    assert (spool.waiting(), drops.snapshot(), uplink.is_well) == (3, {}, False)
    assert caplog.text.count("is of wire version 2; this server reads version 1: upgrade the server") == 1


def test_what_waited_since_an_upgrade_of_the_wire_does_not_stand_in_the_way(agent: tuple[Uplink, Spool, Drops]) -> None:
    uplink, spool, drops = agent
    for version in (0, 0, 1):
        spool.append(of_version(version))
    while uplink.live.send_once() is not None:
        pass
    assert (uplink.delivered, drops.snapshot()["rejected_version"]) == (1, 2)
