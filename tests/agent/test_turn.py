"""Where many agents send to one server, each has its turn after the tick; what is urgent does not wait for it."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.agent.clock import SystemClock
from eagle_eye.agent.collector import Drops
from eagle_eye.agent.transport.servers import Servers
from eagle_eye.agent.transport.spool import Spool
from eagle_eye.agent.transport.uplink import SPREAD_S_MAX, Destination, Uplink, seconds_of
from eagle_eye.schema.frame import Frame, encode_frame
from tests.agent.fakes import until
from tests.agent.test_uplink import Server

NODE = next(f"n{n}" for n in range(100) if zlib.crc32(f"n{n}".encode()) / (1 << 32) > 0.9)


def frame(stream: str, sequence: int) -> bytes:
    return encode_frame(Frame(1, NODE, "boot", stream, sequence, 1_000_000.0, 1.0, "0"))


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.mark.parametrize(("said", "seconds"), [(0.5, 0.5), (-1, 0.0), (1e9, SPREAD_S_MAX), ("1", 0.0), (None, 0.0)])
def test_only_a_sensible_number_counts(said: object, seconds: float) -> None:
    assert seconds_of({"spread_seconds": said}, "spread_seconds", SPREAD_S_MAX) == seconds


def test_a_regular_frame_waits_for_the_nodes_turn_and_an_urgent_one_does_not(server: Server, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", NODE, Drops())
    uplink = Uplink(Destination(Servers([server.url])), spool, Drops(), SystemClock())
    uplink.start()
    server.refuse = lambda frames, _headers: (
        200,
        {},
        {"watermark": (server.take(frames), frames[-1].sequence)[1], "spread_seconds": SPREAD_S_MAX},
    )
    spool.append(frame)
    uplink.notify()
    until(lambda: len(server.frames) == 1)
    until(lambda: spool.waiting() == 0)
    spool.append(frame)
    uplink.notify()
    time.sleep(0.3)  # its turn comes after nine seconds
    assert len(server.frames) == 1
    spool.append(frame)
    uplink.notify(urgent=True)
    until(lambda: [each.sequence for each in server.frames] == [1, 2, 3])
    uplink.stop(1.0)
    spool.close()
