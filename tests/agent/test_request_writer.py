from __future__ import annotations

import zlib

import pytest

from eagle_eye.agent.transport.request_writer import DEFLATE_BYTES_MIN, OLD_SERVER_S, RequestWriter, Written
from eagle_eye.schema import rows
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import CONTENT_TYPE, Frame, Rank, block, decode_frame, decode_request, encode_frame
from eagle_eye.schema.metrics import Scope
from tests.agent.fakes import FakeClock

NOW = 1_000_000.0


def frame(sequence: int, power: float = 300.0, **more: object) -> bytes:
    fields: dict[str, object] = {
        "version": 1,
        "node": "n1",
        "boot_id": "boot",
        "stream": "s",
        "sequence": sequence,
        "time_s": NOW + sequence,
        "interval_s": 1.0,
        "agent_version": "0",
        "ranks": [Rank("job", 0, 1, 0)],
        "blocks": [block(Scope.DEVICE, {0: {"gpu_power_watts": power}})],
    }
    return encode_frame(Frame(**{**fields, **more}))  # type: ignore[arg-type]


def parts(written: Written) -> rows.RowsRequest:
    body = zlib.decompress(written.body) if written.encoding == "deflate" else written.body
    return rows.decode_rows_request(body)


@pytest.fixture
def writer(clock: FakeClock) -> RequestWriter:
    return RequestWriter(clock.monotonic_s)


def test_an_outline_is_sent_until_the_server_has_it_and_then_no_more(writer: RequestWriter) -> None:
    assert len(parts(writer.write([frame(1)], NOW)).outlines) == 1
    assert not writer.answered(503, "busy")
    assert len(parts(writer.write([frame(1)], NOW)).outlines) == 1
    assert not writer.answered(200, "")
    assert parts(writer.write([frame(2)], NOW)).outlines == []


def test_a_server_that_forgot_the_outline_is_told_it_again_at_once(writer: RequestWriter) -> None:
    writer.write([frame(1)], NOW)
    writer.answered(200, "")
    writer.write([frame(2)], NOW)
    assert writer.answered(409, "outline")
    assert len(parts(writer.write([frame(2)], NOW)).outlines) == 1
    assert not writer.answered(409, "outline")  # it was told: trying for ever would help nobody


def test_what_changes_beside_the_numbers_is_another_outline(writer: RequestWriter) -> None:
    writer.write([frame(1)], NOW)
    writer.answered(200, "")
    request = parts(writer.write([frame(2), frame(3, dropped={"spool_full": 1})], NOW))
    assert len(request.outlines) == 1
    assert rows.outline_of_row(request.rows[0]) != rows.outline_of_row(request.rows[1])


def test_silence_and_events_travel_with_the_row(writer: RequestWriter) -> None:
    writer.write([frame(1)], NOW)
    writer.answered(200, "")
    ranks, events = [Rank("job", 0, 1, 0, silent_s=7.5)], [Event(NOW, "xid", 0, {"code": 79})]
    raw = frame(2, ranks=ranks, events=events)
    request = parts(writer.write([raw], NOW))
    outline = rows.outline_of(decode_frame(raw))
    assert request.outlines == []
    assert rows.read_row(outline, request.rows[0]).frame == decode_frame(raw)


def test_a_frame_without_numbers_goes_whole(writer: RequestWriter) -> None:
    raw = frame(1, blocks=[], events=[Event(NOW, "process_exit", 0, {"exit_code": 1})])
    assert parts(writer.write([raw], NOW)).rows == [raw]


def test_an_older_server_gets_whole_frames_for_a_while(writer: RequestWriter, clock: FakeClock) -> None:
    writer.write([frame(1)], NOW)
    assert writer.answered(415, "content_type")
    written = writer.write([frame(1)], NOW)
    assert written.content_type == CONTENT_TYPE
    assert decode_request(written.body)[1] == [frame(1)]
    assert not writer.answered(415, "content_type")  # it reads neither: that is said and not tried in a loop
    clock.advance(OLD_SERVER_S)
    assert writer.write([frame(1)], NOW).content_type == rows.CONTENT_TYPE


def test_many_frames_at_once_are_compressed(writer: RequestWriter) -> None:
    numbered = [frame(sequence, power=sequence % 7) for sequence in range(1, 400)]
    written = writer.write(numbered, NOW)
    assert written.encoding == "deflate"
    assert len(written.body) < DEFLATE_BYTES_MIN
    assert len(parts(written).rows) == len(numbered)
