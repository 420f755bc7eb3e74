"""The codec: what goes in comes out; what is not a frame is refused with a reason and nothing else."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.schema import frame as wire
from eagle_eye.schema.events import EVENTS, Event
from eagle_eye.schema.frame import BadFrame, Frame, Rank, block
from eagle_eye.schema.metrics import METRICS, Scope, names

NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
VALUES = st.floats(allow_nan=True, allow_infinity=True)
TIMES = st.floats(1.0, 4e9)


def frame(**changes: Any) -> Frame:
    fields: dict[str, Any] = {
        "version": 1,
        "node": "n1",
        "boot_id": "b",
        "stream": "s",
        "sequence": 1,
        "time_s": 1.7e9,
        "interval_s": 1.0,
        "agent_version": "0.1.0",
        "job": "j",
        "ranks": [Rank("j", 0, 8, 0)],
        "blocks": [block(Scope.DEVICE, {0: {"train_loss": 2.0}, 1: {"train_step": 3.0}})],
        "events": [Event(1.7e9, "phase", 0, {"name": "eval"})],
    }
    return Frame(**{**fields, **changes})


rows = st.dictionaries(
    st.integers(0, 15),
    st.dictionaries(st.sampled_from(names(Scope.DEVICE)), VALUES, min_size=1, max_size=8),
    min_size=1,
    max_size=8,
)


@given(rows, NAMES, st.integers(1, 2**50), TIMES)
def test_a_frame_survives_the_wire(table: dict[int, dict[str, float]], node: str, sequence: int, time_s: float) -> None:
    sent = frame(node=node, sequence=sequence, time_s=time_s, blocks=[block(Scope.DEVICE, table)])
    assert wire.decode_frame(wire.encode_frame(sent)) == sent


@given(rows)
def test_values_keep_their_places_and_holes_are_nan(table: dict[int, dict[str, float]]) -> None:
    item = block(Scope.DEVICE, table)
    flat = wire.values_of(item)
    for m, metric in enumerate(item.metrics):
        for k, key in enumerate(item.keys):
            expected = table[int(key)].get(metric, math.nan)
            value = flat[m * len(item.keys) + k]
            assert value == expected or (math.isnan(value) and math.isnan(expected))


@given(st.binary(max_size=400))
def test_garbage_is_refused_with_a_reason(raw: bytes) -> None:
    for decode in (wire.decode_frame, wire.decode_request):
        with pytest.raises(BadFrame) as refused:
            decode(raw)
        assert refused.value.reason


@given(st.integers(0, 300), st.integers(1, 255))
def test_a_damaged_frame_never_breaks_the_decoder(position: int, flip: int) -> None:
    raw = bytearray(wire.encode_frame(frame()))
    raw[position % len(raw)] ^= flip
    reason = ""
    try:
        wire.decode_frame(bytes(raw))
    except BadFrame as refused:
        reason = refused.reason
    assert reason in {"", "truncated", "version", "time", "name", "metric", "shape", "event", "oversized"}


@pytest.mark.parametrize("keep", [0, 1, 10, -1])
def test_a_truncated_frame_is_refused(keep: int) -> None:
    with pytest.raises(BadFrame, match="not a complete frame"):
        wire.decode_frame(wire.encode_frame(frame())[:keep])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 2}, "version"),
        ({"time_s": math.nan}, "time"),
        ({"time_s": math.inf}, "time"),
        ({"time_s": -1.0}, "time"),
        ({"interval_s": math.nan}, "time"),
        ({"interval_s": 0.0}, "time"),
        ({"node": ""}, "name"),
        ({"node": "a\nb"}, "name"),
        ({"node": "x" * 254}, "name"),
        ({"sequence": 0}, "shape"),
        ({"events": [Event(math.nan, "phase")]}, "time"),
        ({"events": [Event(1.0, "training_error", 0, {"text": "x" * 20_000})]}, "oversized"),
        ({"events": [Event(1.0, "phase", 0, {"name": ["x"]})]}, "event"),
        ({"events": [Event(1.0, "phase")] * 5000}, "oversized"),
        ({"blocks": [wire.Block(Scope.DEVICE, [0], ["train_loss"], b"1234")]}, "shape"),
        ({"blocks": [wire.Block(Scope.DEVICE, [0], ["node_iowait_ratio"], bytes(8))]}, "metric"),
        ({"blocks": [wire.Block(Scope.DEVICE, [], [f"m{i}" for i in range(2000)], b"")]}, "oversized"),
        ({"blocks": [wire.Block(Scope.NODE, [0], ["node_iowait_ratio"], bytes(8))]}, "shape"),
        ({"blocks": [wire.Block(Scope.DEVICE, [0, 0], ["train_loss"], bytes(16))]}, "shape"),
        ({"blocks": [wire.Block(Scope.DEVICE, list(range(2000)), [], b"")]}, "oversized"),
    ],
)
def test_each_rule_has_its_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadFrame) as refused:
        wire.decode_frame(wire.encode_frame(frame(**changes)))
    assert refused.value.reason == reason


def test_a_frame_beyond_the_limit_is_not_even_read() -> None:
    with pytest.raises(BadFrame, match="at most 1048576"):
        wire.decode_frame(bytes(wire.FRAME_BYTES_MAX + 1))


def test_a_request_keeps_its_frames_as_they_came() -> None:
    raw = [wire.encode_frame(frame(sequence=i)) for i in (1, 2)]
    assert wire.decode_request(wire.encode_request(raw, 1.7e9)) == (1.7e9, raw)


def test_a_request_whose_clock_is_no_number_is_refused() -> None:
    with pytest.raises(BadFrame) as refused:
        wire.decode_request(wire.encode_request([], math.nan))
    assert refused.value.reason == "time"


def test_what_only_a_newer_version_knows_is_left_out_and_named() -> None:
    newer = frame(
        blocks=[
            wire.Block(Scope.DEVICE, [0, 1], ["gpu_mood", "train_loss", "gpu_tone"], struct.pack("<6d", *range(6))),
            wire.Block(Scope.NODE, [-1], ["node_mood"], bytes(8)),
        ],
        events=[Event(1.7e9, "party", 0, {"guests": ["a", "b"]}), Event(1.7e9, "phase", 0, {"name": "eval"})],
    )
    seen, unknown = wire.read_frame(wire.encode_frame(newer))
    assert unknown == ("metric gpu_mood", "metric gpu_tone", "metric node_mood", "event party")
    assert [item.metrics for item in seen.blocks] == [["train_loss"], []]
    assert list(wire.values_of(seen.blocks[0])) == [2.0, 3.0]
    assert [event.kind for event in seen.events] == ["phase"]


def test_of_a_frame_that_is_all_known_nothing_is_left_out() -> None:
    assert wire.read_frame(wire.encode_frame(frame())) == (frame(), ())


def with_new_keys() -> bytes:
    plain = msgspec.msgpack.decode(wire.encode_frame(frame()))
    for item in (plain, plain["ranks"][0], plain["blocks"][0], plain["events"][0]):
        item["mood"] = {"deep": [1, {}]}
    return msgspec.msgpack.encode(plain)


def test_new_keys_of_a_newer_agent_are_passed_over() -> None:
    assert wire.decode_frame(with_new_keys()) == frame()


def test_new_keys_can_be_named() -> None:
    assert wire.unknown_keys(with_new_keys()) == ("key block.mood", "key event.mood", "key frame.mood", "key rank.mood")
    assert wire.unknown_keys(wire.encode_frame(frame())) == ()


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 254])
def test_a_new_key_that_is_no_name_is_not_repeated(name: str) -> None:
    plain = msgspec.msgpack.decode(wire.encode_frame(frame()))
    assert wire.unknown_keys(msgspec.msgpack.encode({**plain, name: 1})) == ("key that is no name",)


@pytest.mark.parametrize(("version", "older"), [(0, "agent"), (2, "server")])
@pytest.mark.parametrize("alike", [True, False])
def test_another_version_is_refused_naming_both_and_who_is_older(version: int, older: str, alike: bool) -> None:
    """Whether or not it looks like this one: the next version may share nothing with it but the key."""
    raw = msgspec.msgpack.decode(wire.encode_frame(frame())) if alike else {"node": 7}
    envelope = {"sent_s": 1.7e9, "frames": []} if alike else {"frames": 7}
    for decode, plain in ((wire.decode_frame, raw), (wire.decode_request, envelope)):
        body = msgspec.msgpack.encode({**plain, "version": version})
        with pytest.raises(BadFrame, match=f"version {version}; .* version 1: upgrade the {older}") as refused:
            decode(body)
        assert refused.value.reason == "version"


def test_text_that_is_no_unicode_costs_no_frame() -> None:
    name = b"/mnt/caf\xe9".decode("utf-8", "surrogateescape")
    sent = frame(collectors={"mounts": f"failed: {name}"}, events=[Event(1.7e9, "phase", 0, {"name": name})])
    seen = wire.decode_frame(wire.encode_frame(sent))
    assert seen.collectors == {"mounts": "failed: /mnt/caf?"}
    assert seen.events[0].attributes == {"name": "/mnt/caf?"}
    assert seen.blocks == sent.blocks


def test_every_metric_says_its_unit_and_help_once() -> None:
    assert len({spec.name for spec in METRICS}) == len(METRICS)
    assert all(spec.unit and spec.help.endswith(".") for spec in METRICS)
    for spec in METRICS:
        assert spec.name.endswith("_total") <= spec.exact


def test_every_event_has_a_help() -> None:
    assert all(spec.help.endswith(".") for spec in EVENTS)
