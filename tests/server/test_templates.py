from __future__ import annotations

from eagle_eye.schema.rows import encode_template, template_of
from eagle_eye.server.ingest.decoding import KnownTemplate, Templates
from tests.server.builders import frame


def raw(node: str) -> bytes:
    return encode_template(template_of(frame(1, node)))


def learnt(templates: Templates, node: str) -> KnownTemplate:
    known = templates.learn(raw(node))
    known.durable = True
    return known


def test_what_the_history_no_longer_has_leaves_memory() -> None:
    templates = Templates(lambda _: None)
    gone, stays = learnt(templates, "n1"), learnt(templates, "n2")
    templates.forget([gone.id])
    assert templates.get(gone.id) is gone
    learnt(templates, "n3")
    assert templates.get(gone.id) is None
    assert templates.get(stays.id) is stays


def test_what_is_used_again_before_it_left_stays() -> None:
    templates = Templates(lambda _: None)
    known = learnt(templates, "n1")
    templates.forget([known.id])
    learnt(templates, "n1")
    learnt(templates, "n2")
    assert templates.get(known.id) is known


def test_of_too_many_the_oldest_leave_memory_and_are_read_back() -> None:
    templates = Templates(lambda _: raw("n1"), kept_max=1)
    first = templates.learn(raw("n1"))
    templates.learn(raw("n2"))
    assert templates.get(first.id) is None
    recalled = templates.recall(first.id)
    assert recalled is not None
    assert recalled.durable
