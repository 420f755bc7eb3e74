"""Rows of templates become the same segments as the whole frames that they stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Block, Frame, Rank, block, decode_frame, encode_frame
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.rows import encode_row, encode_template, template_id, template_of, whole_frame
from eagle_eye.server.history.embedded_history import EmbeddedHistory
from eagle_eye.server.model.batch import Batch
from tests.server.builders import NOW, FakeClock, batch_of, frame, replayed
from tests.server.segments.kept import FOREVER_S, WITHIN_S, compact, opened, retain, rich, told

TWICE = block(Scope.DEVICE, {0: {"gpu_power_watts": 5.0}}).values * 2
MOOD = Block(Scope.DEVICE, [0], ["gpu_mood", "gpu_power_watts"], TWICE)


def as_rows(frames: Sequence[Frame], received_s: float = NOW, offset_s: float = 0.0) -> Batch:
    entries, templates = [], {}
    for one in frames:
        template = template_of(one)
        raw = encode_template(template)
        id_ = template_id(raw)
        templates[id_] = raw
        entries.append((one.sequence, one.time_s, encode_row(one, template, id_)))
    return batch_of(frames[0].node, frames[0].stream, received_s, offset_s, entries, templates)


def as_whole(frames: Sequence[Frame], received_s: float = NOW, offset_s: float = 0.0) -> Batch:
    """Return the frames as an agent of the first wire version would have sent the same rows."""
    entries = []
    for one in frames:
        template = template_of(one)
        entries.append(
            (one.sequence, one.time_s, encode_frame(whole_frame(template, encode_row(one, template, bytes(16)))))
        )
    return batch_of(frames[0].node, frames[0].stream, received_s, offset_s, entries)


def tables(history: EmbeddedHistory) -> list[object]:
    """Return what all segments say, table by table."""
    return [
        pq.read_table(path).to_pylist()
        for folder in sorted(history.segment_store.folder.iterdir(), key=lambda one: one.name.rsplit("-", 1)[0])
        for path in sorted(folder.glob("*.parquet"))
    ]


@st.composite
def streams(draw: st.DrawFn) -> dict[str, list[Frame]]:
    found: dict[str, list[Frame]] = {}
    for node in ("n1", "n2", "n3"):
        frames = []
        for sequence in range(1, draw(st.integers(1, 6))):
            devices = draw(st.sampled_from([(0, 1), (1,), (0, 1, 2)]))
            power = draw(st.floats(width=32, allow_nan=False, allow_infinity=False))
            rows = {at: {"gpu_power_watts": power + at, "gpu_ecc_corrected_total": 2.0**40 + 1} for at in devices}
            frames.append(
                frame(
                    sequence,
                    node,
                    NOW + sequence + draw(st.sampled_from([0.0, -300.0])),
                    ranks=[Rank("job", 3, 8, 0, silent_s=draw(st.sampled_from([0.0, 0.5])))],
                    blocks=draw(
                        st.sampled_from(
                            [
                                [block(Scope.DEVICE, rows)],
                                [block(Scope.DEVICE, rows), block(Scope.NODE, {-1: {"node_blocked_tasks": 1.0}})],
                                [block(Scope.DEVICE, rows), block(Scope.LINK, {"b": {"link_up": 1.0}, "a": {}})],
                                [MOOD],
                                [],
                            ]
                        )
                    ),
                    events=draw(st.sampled_from([[], [Event(NOW, "xid", 1, {"code": 79, "text": "Grüße"})]])),
                    dropped=draw(st.sampled_from([{}, {"late": 2}])),
                )
            )
        if frames:
            found[node] = frames
    return found


@given(streams())
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
def test_segments_do_not_tell_how_frames_came(
    tmp_path_factory: pytest.TempPathFactory, sent: dict[str, list[Frame]]
) -> None:
    told_by = []
    for make in (as_rows, as_whole):
        with opened(tmp_path_factory.mktemp("history")) as history:
            for frames in sent.values():
                history.submit(make(frames, NOW + 10, 0.25)).result(WITHIN_S)
            journal = told(history)
            compact(history)
            assert told(history) == journal
            told_by.append((journal, tables(history)))
    assert told_by[0] == told_by[1]


def test_a_value_that_json_cannot_hold_costs_no_frame(tmp_path: Path) -> None:
    odd = [decode_frame(rich(1)), frame(2, events=[Event(NOW, "xid", 0, {"code": math.inf})]), decode_frame(rich(3))]
    with opened(tmp_path) as history:
        history.submit(as_rows(odd)).result(WITHIN_S)
        compact(history)
        assert sorted(one.frame.sequence for one in history.query([], 0.0, FOREVER_S)) == [1, 2, 3]


def test_templates_go_when_no_row_is_left_that_needs_them(tmp_path: Path) -> None:
    clock = FakeClock()
    lost: list[bytes] = []
    with opened(tmp_path, clock) as history:
        used: list[bytes] = []
        history.journal.templates.listen(lambda: [used.pop() for _ in used[:]], lost.extend)
        history.submit(as_rows([decode_frame(rich(1))])).result(WITHIN_S)
        compact(history)
        clock.advance(2_000)
        later = as_rows([decode_frame(rich(2, "n2"))], clock.now_s())
        history.submit(later).result(WITHIN_S)
        ((id_, raw),) = later.templates.items()
        used.append(id_)
        retain(history)
        assert lost == [template_id(encode_template(template_of(decode_frame(rich(1)))))]
        assert history.template(lost[0]) is None
        assert history.template(id_) == raw
        assert len(told(history)) == 2


def test_a_restart_replays_rows(tmp_path: Path) -> None:
    frames = [decode_frame(rich(n)) for n in (1, 2)]
    with opened(tmp_path) as history:
        history.submit(as_rows(frames)).result(WITHIN_S)
    with opened(tmp_path) as history:
        assert [one.frame.ranks for one in replayed(history, 0.0, 10)] == [one.ranks for one in frames]
