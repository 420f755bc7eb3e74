from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.training_hook.message import (
    MESSAGE_BYTES_MAX,
    BadMessage,
    HookEvent,
    HookMessage,
    Totals,
    decode,
    encode,
)
from tests.agent.fakes import message

amounts = st.floats(min_value=0.0, max_value=1e300)
names = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=60)
events = st.one_of(
    st.builds(
        HookEvent, st.integers(1, 1 << 40), st.floats(1.0, 4e9), st.just("training_error"), st.text(max_size=500)
    ),
    st.builds(HookEvent, st.integers(1, 1 << 40), st.floats(1.0, 4e9), st.just("phase"), names),
    st.builds(
        HookEvent, st.integers(1, 1 << 40), st.floats(1.0, 4e9), st.just("checkpoint_end"), st.integers(-1, 1 << 50)
    ),
)
messages = st.builds(
    HookMessage,
    process=st.binary(min_size=16, max_size=16),
    number=st.integers(1, 1 << 50),
    time_s=st.floats(1.0, 4e9),
    heartbeat_s=st.floats(0.01, 3600.0),
    job=names,
    rank=st.integers(0, 99),
    world_size=st.integers(100, 100_000),
    device=st.integers(0, 1023),
    attempt=st.integers(0, 1000),
    step=st.integers(-1, 1 << 50),
    sequence=st.integers(-1, 1 << 50),
    completed_sequence=st.integers(-1, 1 << 50),
    goodbye=st.booleans(),
    failures=st.integers(0, 0xFFFFFFFF),
    unread=st.integers(0, 0xFFFFFFFF),
    unsent=st.integers(0, 0xFFFFFFFF),
    totals=st.builds(Totals, *[amounts] * len(Totals._fields)),
    role=st.one_of(st.just(""), names),
    phase=st.one_of(st.just(""), names),
    gpu=st.one_of(st.just(""), names),
    events=st.lists(events, max_size=4).map(tuple),
    unknown_events=st.just(0),
    quorum=st.integers(-1, 1 << 40),
)


@given(messages)
def test_what_is_encoded_is_decoded(original: HookMessage) -> None:
    assert decode(encode(original)) == original


@given(st.binary(max_size=600))
def test_garbage_is_refused_with_a_reason(datagram: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(datagram)


@given(messages, st.data())
def test_a_damaged_message_is_decoded_or_refused_and_nothing_else(original: HookMessage, data: st.DataObject) -> None:
    raw = bytearray(encode(original))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(5, len(raw) - 1))] = data.draw(st.integers(0, 255))
    assert reason_of(bytes(raw)) in {"", "truncated", "range", "text", "event"}


def test_an_event_of_a_newer_hook_costs_nothing_but_itself() -> None:
    seen = decode(
        encode(message(step=7), b'{"job":"j","events":[[1,2.0,"phase","eval"],[2,2.0,"party",{"a":[1]}]],"x":1}')
    )
    assert (seen.step, seen.events, seen.unknown_events) == (7, (HookEvent(1, 2.0, "phase", "eval"),), 1)


def test_a_text_that_no_frame_could_carry_is_mended() -> None:
    seen = decode(encode(message(), b'{"job":"j","events":[[1,2.0,"training_error","bad \\ud800 text"]]}'))
    assert [event.value for event in seen.events] == ["bad ? text"]


def reason_of(datagram: bytes) -> str:
    try:
        decode(datagram)
    except BadMessage as error:
        return error.reason
    return ""


@pytest.mark.parametrize(
    ("datagram", "reason"),
    [
        (b"", "magic"),
        (b"NOPE" + bytes(400), "magic"),
        (b"EEHK\x02" + bytes(400), "version"),
        (b"EEHK\x01" + bytes(40), "truncated"),
        (encode(message())[:-1], "truncated"),
        (encode(message()) + b"x", "truncated"),
        (bytes(MESSAGE_BYTES_MAX + 1), "oversized"),
        (encode(message(time_s=math.nan)), "range"),
        (encode(message(heartbeat_s=0.0)), "range"),
        (encode(message(totals=Totals(step_s=math.inf))), "range"),
        (encode(message(totals=Totals(steps=-1.0))), "range"),
        (encode(message(rank=2)), "range"),
        (encode(message(device=1024)), "range"),
        (encode(message(), b"[1]"), "text"),
        (encode(message(), b"\xff\xfe"), "text"),
        (encode(message(), b'{"job":"a\\u0000b","events":[]}'), "text"),
        (encode(message(), b'{"job":"","events":[]}'), "text"),
        (encode(message(), b'{"job":"j","events":[[1,NaN,"phase","x"]]}'), "text"),
        (encode(message(), b"[" * 5000), "text"),
        (encode(message(), b'{"job":"j","events":7}'), "event"),
        (encode(message(), b'{"job":"j","events":[[1,2.0,"","x"]]}'), "event"),
        (encode(message(), b'{"job":"j","events":[[1,2.0,["phase"],"x"]]}'), "event"),
        (encode(message(), b'{"job":"j","events":[[1,2.0,"phase",3]]}'), "event"),
        (encode(message(), b'{"job":"j","events":[[true,2.0,"phase","x"]]}'), "event"),
        (encode(message(), b'{"job":"j","events":[[1,2.0,"checkpoint_end",true]]}'), "event"),
        (encode(message(events=(HookEvent(1, 2.0, "training_error", "é" * 1025),))), "event"),
    ],
)
def test_each_kind_of_bad_message_has_its_reason(datagram: bytes, reason: str) -> None:
    with pytest.raises(BadMessage) as caught:
        decode(datagram)
    assert caught.value.reason == reason
    assert str(caught.value)  # what was seen, for people


def test_the_head_has_the_documented_size() -> None:
    tail = struct.unpack_from("<H", encode(message()), 282)[0]
    assert len(encode(message())) == 284 + tail
