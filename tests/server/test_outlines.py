from __future__ import annotations

from eagle_eye.schema.rows import encode_outline, outline_of
from eagle_eye.server.ingest.outlines import KnownOutline, Outlines
from tests.server.builders import frame


def raw(node: str) -> bytes:
    return encode_outline(outline_of(frame(1, node)))


def learnt(outlines: Outlines, node: str) -> KnownOutline:
    known = outlines.learn(raw(node))
    known.durable = True
    return known


def test_what_the_history_no_longer_has_leaves_memory() -> None:
    outlines = Outlines(lambda _: None)
    gone, stays = learnt(outlines, "n1"), learnt(outlines, "n2")
    outlines.forget([gone.id])
    assert outlines.get(gone.id) is gone
    learnt(outlines, "n3")
    assert outlines.get(gone.id) is None
    assert outlines.get(stays.id) is stays


def test_what_is_used_again_before_it_left_stays() -> None:
    outlines = Outlines(lambda _: None)
    known = learnt(outlines, "n1")
    outlines.forget([known.id])
    learnt(outlines, "n1")
    learnt(outlines, "n2")
    assert outlines.get(known.id) is known


def test_of_too_many_the_oldest_leave_memory_and_are_read_back() -> None:
    outlines = Outlines(lambda _: raw("n1"), kept_max=1)
    first = outlines.learn(raw("n1"))
    outlines.learn(raw("n2"))
    assert outlines.get(first.id) is None
    recalled = outlines.recall(first.id)
    assert recalled is not None
    assert recalled.durable
