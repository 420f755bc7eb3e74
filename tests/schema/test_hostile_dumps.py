"""Small pickles that would cost the reader its time or its life."""

from __future__ import annotations

import contextlib
import struct
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.schema.flight_recorder import TEXT_CHARS_MAX, BadDump, decode, text_of

LARGE = b"\x8a\x06" + b"\x01" * 6  # an integer of 48 bits
TWICE = b"".join(b"q" + bytes([number]) + b"h" + bytes([number]) + b"\x86" for number in range(100))
KEYS = {
    "a tuple whose hash overflows the stack": b")" + b"\x85" * 400_000,
    "a tuple whose hash takes 2^100 steps": b")" + TWICE,
    "an integer, one of a million that share one hash": b"\x8a\x09" + b"\xff" * 8 + b"\x00",
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("form", [b"}%bNs.", b"}(%bNu.", b"(%bNd.", b"}(NN%bNu.", b"%b\x940}h\x00Ns."])
def test_a_key_that_is_neither_text_nor_a_small_number_is_never_hashed(form: bytes, key: bytes) -> None:
    with pytest.raises(BadDump, match=r"a dictionary's key is|plain data only"):
        decode(b"\x80\x02" + form % key)


def test_an_integer_of_many_bytes_is_refused() -> None:
    with pytest.raises(BadDump, match="plain data only"):
        decode(b"\x80\x02\x8b" + struct.pack("<I", 300) + b"\x01" * 300 + b".")


def test_a_long_text_that_many_refer_to_is_not_looked_at_as_a_whole() -> None:
    text = "a" * (8 << 20) + "\n"
    begin_s = time.thread_time()
    assert {text_of(text) for _ in range(10_000)} == {"a" * TEXT_CHARS_MAX}
    assert time.thread_time() - begin_s < 2.0  # 20 ms; to look at all of it each time takes minutes


PLAIN = (
    *(b"N", b"K\x01", LARGE, b"X\x01\x00\x00\x00x", b"(", b")", b"]", b"}", b"\x94"),
    *(b"t", b"l", b"d", b"s", b"u", b"a", b"e", b"\x85", b"\x86", b"\x87"),
    *(b"q\x00", b"q\x01", b"q\x02", b"h\x00", b"h\x01", b"h\x02", b"r\x01\x00\x00\x00", b"j\x01\x00\x00\x00"),
)


@settings(max_examples=500)
@given(st.lists(st.sampled_from(PLAIN), max_size=30), st.booleans())
def test_whatever_leads_to_it_no_such_key_gets_through(opcodes: list[bytes], in_dictionary: bool) -> None:
    raw = b"}(" + b"".join(opcodes) + b"u" if in_dictionary else b"".join(opcodes)
    with contextlib.suppress(BadDump):
        for held in containers(decode(b"\x80\x02" + raw + b".")):
            assert not isinstance(held, dict) or all(key in (None, "x", 1) for key in held)


def containers(value: Any) -> list[Any]:
    """Return all that a value holds, and itself; each once."""
    found: dict[int, Any] = {}
    left = [value]
    while left:
        one = left.pop()
        if id(one) not in found:
            found[id(one)] = one
            left += [*one, *one.values()] if isinstance(one, dict) else one if isinstance(one, (list, tuple)) else []
    return list(found.values())
