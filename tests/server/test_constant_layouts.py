"""Many requests read at once: the usual ones become columns, the others are left as they came."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import pytest

from eagle_eye.schema.frame import Frame
from eagle_eye.schema.rows import (
    REQUEST_HEAD,
    SIZE,
    decode_template,
    encode_row,
    encode_rows_request,
    encode_template,
    template_id,
    template_of,
)
from eagle_eye.server.ingest.decoding import KnownTemplate, Usual, read_single_rows
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.batch import ResolvedTemplate
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


def known(one: Frame) -> KnownTemplate:
    raw = encode_template(template_of(one))
    return KnownTemplate(template_id(raw), raw, ResolvedTemplate(*decode_template(raw)), durable=True)


def usual(one: Frame, sent_s: float = NOW + 5.0, template: KnownTemplate | None = None) -> Usual:
    template = template or known(one)
    body = encode_rows_request([], [encode_row(one, template_of(one), template.id)], sent_s)
    assert len(body) == template.alone_bytes
    return Usual(template, NODE, body, 505.0, Waiting())


def test_requests_of_one_layout_become_one_batch() -> None:
    requests = [usual(frame(number, f"n{number}")) for number in (1, 2, 3)]
    (((of, batch),), odd) = read_single_rows(requests, Fleet(10), WALL_S)
    assert (list(of), odd) == (requests, [])
    assert batch.sequence.tolist() == [1, 2, 3]
    assert [ref.name[0] for ref in batch.refs] == ["n1", "n2", "n3"]
    assert batch.time_s.tolist() == batch.server_time_s.tolist() == [frame(number).time_s for number in (1, 2, 3)]
    assert batch.received_s.tolist() == [505.0 + WALL_S] * 3
    assert [bytes(raw) for raw in batch.raw] == [one.body[REQUEST_HEAD.size + SIZE.size :] for one in requests]
    whole = [
        resolved.frame(n, t, row.tobytes())
        for n, resolved, t, row in zip((1, 2, 3), batch.resolved, batch.time_s.tolist(), batch.numbers, strict=True)
    ]
    assert [one.blocks for one in whole] == [frame(number).blocks for number in (1, 2, 3)]


def test_a_clock_that_is_off_is_corrected() -> None:
    (((_, batch),), _) = read_single_rows([usual(frame(1, time_s=NOW - 3_600), NOW - 3_600)], Fleet(10), WALL_S)
    assert batch.offset_s.tolist() == [3_605.0]
    assert batch.server_time_s.tolist() == [NOW + 5.0]
    assert batch.time_s.tolist() == [NOW - 3_600]


def test_the_second_request_of_a_node_is_left() -> None:
    first, second, other = usual(frame(1)), usual(frame(2)), usual(frame(1, "n2"))
    (((of, _),), odd) = read_single_rows([first, second, other], Fleet(10), WALL_S)
    assert (list(of), odd) == ([first, other], [second])


def test_what_a_template_that_is_not_durable_any_more_says_is_left() -> None:
    one = usual(frame(1))
    one.known.durable = False
    assert read_single_rows([one], Fleet(10), WALL_S) == ([], [one])


def changed(body: bytes, at: int, part: bytes) -> bytes:
    return body[:at] + part + body[at + len(part) :]


@pytest.mark.parametrize(
    ("at", "part"),
    [
        (0, b"NONE"),  # the magic
        (4, b"\1\0"),  # a template
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
    (((of, _),), odd) = read_single_rows([good, bad], Fleet(10), WALL_S)
    assert (list(of), odd) == ([good], [bad])


@pytest.mark.parametrize("sent_s", [frame(1).time_s - 0.5, frame(1).time_s + 10.5, float("nan"), 1e18])
def test_what_is_late_or_of_the_future_is_left(sent_s: float) -> None:
    one = usual(frame(1), sent_s)
    assert read_single_rows([one], Fleet(10), WALL_S) == ([], [one])


def test_of_what_came_only_the_new_is_news() -> None:
    requests = [usual(frame(number, f"n{number}")) for number in (1, 2, 3)]
    (((_, batch),), _) = read_single_rows(requests, Fleet(10), WALL_S)
    assert batch.only([True, True, True]) is batch
    news = batch.only([False, True, False])
    assert ([one.node for one in news.resolved], [ref.name[0] for ref in news.refs]) == (["n2"], ["n2"])
    columns = (batch.sequence, batch.time_s, batch.received_s, batch.offset_s, batch.raw)
    assert [np.asarray(column)[1:2].tolist() for column in columns] == [np.asarray(one).tolist() for one in news[1:6]]
    assert batch.only([False] * 3).resolved == []
