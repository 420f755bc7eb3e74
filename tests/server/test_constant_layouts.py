"""Many requests read at once: the usual ones become columns, the others are left as they came."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from eagle_eye.schema.frame import Frame
from eagle_eye.schema.rows import (
    REQUEST_HEAD,
    SIZE,
    decode_outline,
    encode_outline,
    encode_row,
    encode_rows_request,
    outline_id,
    outline_of,
)
from eagle_eye.server.engine.outlined import Outlined
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.ingest.outlines import KnownOutline
from eagle_eye.server.ingest.single_row_requests import Usual, read
from eagle_eye.server.security.auth import Principal
from tests.server.builders import NOW, frame

WALL_S = NOW - 500.0  # the server's clock minus the monotonic one
NODE = Principal("somebody", "admin")


class Waiting:
    """Nobody is answered here."""

    def accept(self, body: bytes) -> None:
        raise AssertionError(body)

    def answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        raise AssertionError(status, body, headers)

    def refuse(self, error: Exception) -> None:
        raise AssertionError(error)


def known(one: Frame) -> KnownOutline:
    raw = encode_outline(outline_of(one))
    return KnownOutline(outline_id(raw), raw, Outlined(*decode_outline(raw)), durable=True)


def usual(one: Frame, sent_s: float = NOW + 5.0, outline: KnownOutline | None = None) -> Usual:
    outline = outline or known(one)
    body = encode_rows_request([], [encode_row(one, outline_of(one), outline.id)], sent_s)
    assert len(body) == outline.alone_bytes
    return Usual(outline, NODE, body, 505.0, Waiting())


def test_requests_of_one_layout_become_one_group() -> None:
    requests = [usual(frame(number, f"n{number}")) for number in (1, 2, 3)]
    ((columns,), odd) = read(requests, Fleet(10), WALL_S)
    assert odd == []
    assert columns.batch.sequence.tolist() == [1, 2, 3]
    assert [ref.name[0] for ref in columns.batch.refs] == ["n1", "n2", "n3"]
    assert columns.batch.time_s.tolist() == columns.group.time_s == [frame(number).time_s for number in (1, 2, 3)]
    assert columns.group.received_s == [505.0 + WALL_S] * 3
    assert [bytes(raw) for raw in columns.batch.raw] == [one.body[REQUEST_HEAD.size + SIZE.size :] for one in requests]
    whole = [
        one.outlined.frame(n, t, row.tobytes())
        for n, one, t, row in zip(
            (1, 2, 3), [request.known for request in requests], columns.group.time_s, columns.group.numbers, strict=True
        )
    ]
    assert [one.blocks for one in whole] == [frame(number).blocks for number in (1, 2, 3)]


def test_a_clock_that_is_off_is_corrected() -> None:
    ((columns,), _) = read([usual(frame(1, time_s=NOW - 3_600), NOW - 3_600)], Fleet(10), WALL_S)
    assert columns.batch.offset_s.tolist() == [3_605.0]
    assert columns.group.time_s == [NOW + 5.0]
    assert columns.batch.time_s.tolist() == [NOW - 3_600]


def test_the_second_request_of_a_node_is_left() -> None:
    first, second, other = usual(frame(1)), usual(frame(2)), usual(frame(1, "n2"))
    ((columns,), odd) = read([first, second, other], Fleet(10), WALL_S)
    assert (list(columns.requests), odd) == ([first, other], [second])


def test_what_an_outline_that_is_not_durable_any_more_says_is_left() -> None:
    one = usual(frame(1))
    one.known.durable = False
    assert read([one], Fleet(10), WALL_S) == ([], [one])


def changed(body: bytes, at: int, part: bytes) -> bytes:
    return body[:at] + part + body[at + len(part) :]


@pytest.mark.parametrize(
    ("at", "part"),
    [
        (0, b"NONE"),  # the magic
        (4, b"\1\0"),  # an outline
        (6, b"\2\0"),  # two rows
        (REQUEST_HEAD.size, SIZE.pack(7)),
        (20, b"\1"),  # the row's version
        (24, SIZE.pack(1)),  # a tail
        (44, bytes(8)),  # sequence 0
        (44, b"\xff" * 8),  # a sequence that JSON cannot say
        (52, b"\xff" * 8),  # a time that is no number
    ],
)
def test_what_is_unusual_is_left(at: int, part: bytes) -> None:
    good, bad = usual(frame(1)), usual(frame(1, "n2"))
    bad = msgspec.structs.replace(bad, body=changed(bad.body, at, part))
    ((columns,), odd) = read([good, bad], Fleet(10), WALL_S)
    assert (list(columns.requests), odd) == ([good], [bad])


@pytest.mark.parametrize("sent_s", [frame(1).time_s - 0.5, frame(1).time_s + 10.5, float("nan"), 1e18])
def test_what_is_late_or_of_the_future_is_left(sent_s: float) -> None:
    one = usual(frame(1), sent_s)
    assert read([one], Fleet(10), WALL_S) == ([], [one])


def test_of_what_came_only_the_new_is_news() -> None:
    requests = [usual(frame(number, f"n{number}")) for number in (1, 2, 3)]
    ((columns,), _) = read(requests, Fleet(10), WALL_S)
    assert columns.new([True, True, True]) is columns.group
    news = columns.new([False, True, False])
    assert ([one.node for one in news.outlined], news.time_s, news.received_s) == (
        ["n2"],
        [columns.group.time_s[1]],
        [columns.group.received_s[1]],
    )
    assert news.numbers.tobytes() == columns.group.numbers[1].tobytes()
    assert columns.new([False] * 3).outlined == []
