from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema import rows
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import BadFrame, Block, Frame, Rank, block, encode_frame, read_frame, values_of
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.rows import unknown_template_keys

NAMES = {scope: catalogue.names(scope) for scope in Scope}
PLAIN = st.one_of(st.floats(width=32, allow_nan=False), st.just(math.inf))
SCOPE_KEYS: dict[Scope, st.SearchStrategy[Any]] = {
    Scope.DEVICE: st.lists(st.integers(0, 15), min_size=1, max_size=8, unique=True),
    Scope.NODE: st.just([-1]),
    Scope.LINK: st.lists(st.sampled_from(["mlx5_0", "mlx5_1", "eth0"]), min_size=1, unique=True),
}


@st.composite
def blocks(draw: st.DrawFn) -> list[Block]:
    found = []
    for scope in draw(st.lists(st.sampled_from(list(Scope)), unique=True)):
        keys = draw(SCOPE_KEYS[scope])
        names = draw(st.lists(st.sampled_from(NAMES[scope]), min_size=1, max_size=6, unique=True))
        found.append(block(scope, {key: {name: draw(PLAIN) for name in names} for key in keys}))
    return found


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    silent_s = st.one_of(st.just(0.0), st.floats(0, 1e4))
    ranks = [Rank("job", rank, 8, rank, silent_s=draw(silent_s)) for rank in range(draw(st.integers(0, 3)))]
    events = draw(st.lists(st.builds(Event, st.floats(1.0, 2e9), st.just("xid"), attributes=st.just({"code": 79}))))
    return Frame(
        version=1,
        node="n1",
        boot_id="boot",
        stream="s",
        sequence=draw(st.integers(1, 1 << 40)),
        time_s=draw(st.floats(1.0, 4e9)),
        interval_s=1.0,
        agent_version="0",
        job=draw(st.sampled_from([None, "job"])),
        ranks=ranks,
        blocks=draw(blocks()),
        events=events[:3],
        collectors={"nvml": "ok"},
        dropped={"spool_full": 2},
    )


def tables_of(frame: Frame) -> list[tuple[rows.TemplateBlock, bytes]]:
    """Return the frame's numbers as a collector gives them, put into tables."""
    found = []
    for item in frame.blocks:
        values, width = values_of(item), len(item.keys)
        lines = {
            key: {name: values[at * width + row] for at, name in enumerate(item.metrics)}
            for row, key in enumerate(item.keys)
        }
        found.append(rows.table(item.scope, lines))  # type: ignore[arg-type]  # keys of one scope are of one type
    return found


def written(writer: rows.RowWriter, frame: Frame) -> bytes:
    tables = tables_of(frame)
    template = msgspec.structs.replace(rows.template_of(frame), blocks=[one for one, _ in tables])
    tail = rows.Tail(frame.events, rows.silences(frame.ranks))
    return writer.write(template, frame.sequence, frame.time_s, b"".join([numbers for _, numbers in tables]), tail)


@given(st.lists(frames(), min_size=1, max_size=3))
def test_what_a_writer_wrote_says_what_was_seen(said: list[Frame]) -> None:
    writer = rows.RowWriter()
    for frame in said:
        raw = written(writer, frame)
        assert rows.read_written(raw).frame == read_frame(encode_frame(in_template_order(frame))).frame
        parts = rows.split_row(raw)
        assert (parts is None) == (not frame.blocks)
        if parts is not None:
            assert parts == (rows.encode_template(rows.template_of(frame)), as_row(frame)[1])
            assert rows.decode_rows_request(raw) == (frame.time_s, [parts[0]], [parts[1]])


def in_template_order(frame: Frame) -> Frame:
    """Return the frame with the metrics in the order in which rows have them."""
    return rows.whole_frame(*as_row(frame))


def test_a_row_that_lacks_a_metric_has_nan_for_it() -> None:
    template, numbers = rows.table(
        Scope.DEVICE, {0: {"gpu_power_watts": 300.0, "train_step": 7.0}, 3: {"gpu_power_watts": 250.0}}
    )
    assert (template.keys, template.metrics, template.exact) == ([0, 3], ["train_step", "gpu_power_watts"], 1)
    assert struct.unpack("<dd", numbers[:16]) == (7.0, pytest.approx(math.nan, nan_ok=True))
    assert struct.unpack("<ff", numbers[16:]) == (300.0, 250.0)


@pytest.mark.parametrize("name", ["gpu_mood", "node_memory_used_ratio"])
def test_what_is_no_metric_of_the_scope_is_no_column(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        rows.table(Scope.DEVICE, {0: {name: 1.0}})


def test_a_text_that_is_no_unicode_costs_no_sample() -> None:
    template, numbers = rows.table(Scope.NODE, {-1: {"node_memory_used_ratio": 0.5}})
    said = rows.RowTemplate(2, "n1", "boot", "s", 1.0, "0", blocks=[template], collectors={"nvml": "failed: \udc80"})
    raw = rows.RowWriter().write(said, 1, 1.0, numbers, rows.Tail())
    frame = rows.read_written(raw).frame
    assert (frame.collectors, list(values_of(frame.blocks[0]))) == ({"nvml": "failed: ?"}, [0.5])


def as_row(frame: Frame) -> tuple[rows.RowTemplate, bytes]:
    template = rows.template_of(frame)
    return template, rows.encode_row(frame, template, rows.template_id(rows.encode_template(template)))


def cells(frame: Frame) -> dict[tuple[str, int | str], float]:
    return {
        (name, key): value
        for each in frame.blocks
        for name, values in zip(each.metrics, _columns(each), strict=True)
        for key, value in zip(each.keys, values, strict=True)
    }


def _columns(each: Block) -> list[list[float]]:
    flat = values_of(each).tolist()
    return [flat[at : at + len(each.keys)] for at in range(0, len(flat), len(each.keys))]


@given(frames())
def test_a_row_and_its_template_say_what_the_frame_said(frame: Frame) -> None:
    template, row = as_row(frame)
    template = rows.decode_template(rows.encode_template(template))[0]
    read = rows.read_row(template, row).frame
    assert cells(read) == cells(frame)
    assert msgspec.structs.replace(read, blocks=[]) == msgspec.structs.replace(frame, blocks=[])


@given(frames())
def test_counters_keep_all_their_digits_and_gauges_those_of_float32(frame: Frame) -> None:
    template, _ = as_row(frame)
    for place in template.blocks:
        assert all(catalogue.BY_NAME[name].exact for name in place.metrics[: place.exact])
        assert not any(catalogue.BY_NAME[name].exact for name in place.metrics[place.exact :])


def test_new_keys_of_a_template_can_be_named_and_are_passed_over() -> None:
    rank, table = Rank("job", 0, 8, 0), block(Scope.NODE, {-1: {"node_iowait_ratio": 0.5}})
    whole = Frame(1, "n1", "boot", "s", 1, 1.7e9, 1.0, "0", "job", [rank], [table])
    raw = rows.encode_template(rows.template_of(whole))
    plain = msgspec.msgpack.decode(raw)
    for item in (plain, plain["ranks"][0], plain["blocks"][0]):
        item["mood"] = {"deep": [1, {}]}
    newer = msgspec.msgpack.encode(plain)
    assert unknown_template_keys(raw) == ()
    assert unknown_template_keys(newer) == ("key block.mood", "key frame.mood", "key rank.mood")
    assert rows.decode_template(newer)[0] == rows.template_of(whole)


@given(st.lists(st.binary(max_size=50), max_size=5), st.lists(st.binary(max_size=50), max_size=5))
def test_a_request_comes_apart_as_it_was_put_together(templates: list[bytes], items: list[bytes]) -> None:
    body = rows.encode_rows_request(templates, items, 5.0)
    assert rows.decode_rows_request(body) == (5.0, templates, items)


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_happens(raw: bytes) -> None:
    template, row = as_row(Frame(1, "n1", "boot", "s", 1, 5.0, 1.0, "0", blocks=[block(Scope.NODE, {-1: {}})]))
    for read in (
        lambda: rows.decode_rows_request(raw),
        lambda: rows.decode_rows_request(rows.REQUEST_HEAD.pack(rows.MAGIC, 1, 1, 5.0) + raw),
        lambda: rows.decode_template(raw),
        lambda: rows.read_row(template, row[:8] + raw),
        lambda: rows.read_row(template, raw),
    ):
        try:
            read()
        except BadFrame:
            continue


@given(frames(), st.data())
def test_a_row_that_is_cut_or_longer_is_refused(frame: Frame, data: st.DataObject) -> None:
    template, row = as_row(frame)
    cut = data.draw(st.integers(0, len(row) - 1))
    for spoiled in (row[:cut], row + b"\0"):
        with pytest.raises(BadFrame):
            rows.read_row(template, spoiled)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"version": 3}, "version"),
        ({"sequence": 0}, "shape"),
        ({"sequence": 1 << 53}, "shape"),
        ({"time_s": 0.0}, "time"),
        ({"time_s": math.nan}, "time"),
        ({"time_s": 253_402_300_800.0}, "time"),
    ],
)
def test_the_beginning_of_a_row_is_refused_before_its_template_is_known(changed: dict[str, Any], reason: str) -> None:
    said: dict[str, Any] = {"version": 2, "sequence": 1, "time_s": 1.7e9, **changed}
    row = rows.ROW_HEAD.pack(said["version"], 0, bytes(rows.ID_BYTES), said["sequence"], said["time_s"])
    with pytest.raises(BadFrame) as refused:
        rows.row_head(row)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 3}, "version"),
        ({"node": ""}, "name"),
        ({"interval_s": 0.0}, "time"),
        ({"blocks": [rows.TemplateBlock(Scope.DEVICE, [0], ["gpu_power_watts"], 2)]}, "shape"),
        ({"blocks": [rows.TemplateBlock(Scope.DEVICE, [0, 0], ["gpu_power_watts"], 0)]}, "shape"),
        ({"blocks": [rows.TemplateBlock(Scope.NODE, [-1], ["gpu_power_watts"], 0)]}, "metric"),
        ({"blocks": [rows.TemplateBlock(Scope.DEVICE, list(range(1025)), ["gpu_power_watts"], 0)]}, "oversized"),
    ],
)
def test_a_template_is_checked_as_a_frame_is(change: dict[str, object], reason: str) -> None:
    template = rows.template_of(Frame(1, "n1", "boot", "s", 1, 5.0, 1.0, "0"))
    with pytest.raises(BadFrame) as refused:
        rows.decode_template(rows.encode_template(msgspec.structs.replace(template, **change)))
    assert refused.value.reason == reason


def test_a_metric_of_a_newer_agent_is_named_and_left_out() -> None:
    known = Block(Scope.DEVICE, [0], ["gpu_mood", "gpu_power_watts"], b"\0" * 16)
    frame = Frame(1, "n1", "boot", "s", 1, 5.0, 1.0, "0", blocks=[known])
    template, row = as_row(frame)
    assert rows.decode_template(rows.encode_template(template))[1] == ("metric gpu_mood",)
    reading = rows.read_row(template, row)
    assert reading.unknown == ("metric gpu_mood",)
    assert reading.frame == read_frame(encode_frame(frame)).frame
