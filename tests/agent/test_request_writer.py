from __future__ import annotations

import zlib

import pytest

from eagle_eye.agent.transport.uplink import DEFLATE_BYTES_MIN, OLD_SERVER_S, RequestWriter, Written
from eagle_eye.schema import rows
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import CONTENT_TYPE, Frame, Rank, block, decode_frame, decode_request, encode_frame
from eagle_eye.schema.metrics import Scope
from tests.agent.fakes import FakeClock

NOW = 1_000_000.0


def whole(sequence: int, power: float = 300.0, **more: object) -> bytes:
    """Return a whole frame, as agents kept them until rows were kept."""
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


def frame(sequence: int, power: float = 300.0, **more: object) -> bytes:
    """Return a frame as the loop has it kept."""
    raw = whole(sequence, power, **more)
    said = decode_frame(raw)
    if not said.blocks:
        return raw
    template = rows.template_of(said)
    told = rows.encode_template(template)
    return rows.encode_rows_request([told], [rows.encode_row(said, template, rows.template_id(told))], said.time_s)


def parts(written: Written) -> rows.RowsRequest:
    body = zlib.decompress(written.body) if written.encoding == "deflate" else written.body
    return rows.decode_rows_request(body)


@pytest.fixture
def writer(clock: FakeClock) -> RequestWriter:
    return RequestWriter(clock.monotonic_s)


def test_a_template_is_sent_until_the_server_has_it_and_then_no_more(writer: RequestWriter) -> None:
    assert len(parts(writer.write([frame(1)], NOW)).templates) == 1
    assert not writer.answered(503, "busy")
    assert len(parts(writer.write([frame(1)], NOW)).templates) == 1
    assert not writer.answered(200, "")
    assert parts(writer.write([frame(2)], NOW)).templates == []


def test_a_server_that_forgot_the_template_is_told_it_again_at_once(writer: RequestWriter) -> None:
    writer.write([frame(1)], NOW)
    writer.answered(200, "")
    writer.write([frame(2)], NOW)
    assert writer.answered(409, "outline")
    assert len(parts(writer.write([frame(2)], NOW)).templates) == 1
    assert not writer.answered(409, "outline")  # it was told: trying for ever would help nobody


def test_what_changes_beside_the_numbers_is_another_template(writer: RequestWriter) -> None:
    writer.write([frame(1)], NOW)
    writer.answered(200, "")
    request = parts(writer.write([frame(2), frame(3, dropped={"spool_full": 1})], NOW))
    assert len(request.templates) == 1
    assert rows.template_of_row(request.rows[0]) != rows.template_of_row(request.rows[1])


def test_silence_and_events_travel_with_the_row(writer: RequestWriter) -> None:
    writer.write([frame(1)], NOW)
    writer.answered(200, "")
    ranks, events = [Rank("job", 0, 1, 0, silent_s=7.5)], [Event(NOW, "xid", 0, {"code": 79})]
    said = decode_frame(whole(2, ranks=ranks, events=events))
    request = parts(writer.write([frame(2, ranks=ranks, events=events)], NOW))
    assert request.templates == []
    assert rows.read_row(rows.template_of(said), request.rows[0]).frame == said


def test_a_frame_without_numbers_goes_whole(writer: RequestWriter) -> None:
    raw = frame(1, blocks=[], events=[Event(NOW, "process_exit", 0, {"exit_code": 1})])
    assert parts(writer.write([raw], NOW)).rows == [raw]


def test_what_an_earlier_agent_kept_whole_goes_as_it_was_kept(writer: RequestWriter) -> None:
    request = parts(writer.write([whole(1), frame(2)], NOW))
    assert request.rows[0] == whole(1)
    assert rows.is_row(request.rows[1])


def test_rows_are_sent_as_the_bytes_that_were_kept(writer: RequestWriter) -> None:
    kept = [frame(1), frame(2)]
    request = parts(writer.write(kept, NOW))
    assert [rows.split_row(raw) for raw in kept] == [(request.templates[0], row) for row in request.rows]


def test_of_more_templates_than_a_request_may_have_the_rest_goes_whole(writer: RequestWriter) -> None:
    kept = [frame(n, dropped={"spool_full": n}) for n in range(1, rows.TEMPLATES_PER_REQUEST_MAX + 3)]
    request = parts(writer.write(kept, NOW))
    assert len(request.templates) == rows.TEMPLATES_PER_REQUEST_MAX
    assert [rows.is_row(row) for row in request.rows[-3:]] == [True, False, False]
    assert decode_frame(request.rows[-1]).sequence == len(kept)


def test_an_older_server_gets_whole_frames_for_a_while(writer: RequestWriter, clock: FakeClock) -> None:
    writer.write([frame(1)], NOW)
    assert writer.answered(415, "content_type")
    written = writer.write([frame(1)], NOW)
    assert written.content_type == CONTENT_TYPE
    assert decode_request(written.body)[1] == [whole(1)]
    assert not writer.answered(415, "content_type")  # it reads neither: that is said and not tried in a loop
    clock.advance(OLD_SERVER_S)
    assert writer.write([frame(1)], NOW).content_type == rows.CONTENT_TYPE


def test_many_frames_at_once_are_compressed(writer: RequestWriter) -> None:
    numbered = [frame(sequence, power=sequence % 7) for sequence in range(1, 400)]
    written = writer.write(numbered, NOW)
    assert written.encoding == "deflate"
    assert len(written.body) < DEFLATE_BYTES_MIN
    assert len(parts(written).rows) == len(numbered)
