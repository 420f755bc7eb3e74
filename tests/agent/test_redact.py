from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.redact import MASK, redact


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("login failed: password=hunter2 for x", "hunter2"),
        ("HF_TOKEN=abcdefgh", "abcdefgh"),
        ("headers {'Authorization': 'Bearer abc.def-123'}", "abc.def-123"),
        ('{"api_key": "k-123456", "n": 1}', "k-123456"),
        ("AWS_SECRET_ACCESS_KEY: wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI"),
        ("s3 AKIAIOSFODNN7EXAMPLE denied", "AKIAIOSFODNN7EXAMPLE"),
        ("postgresql://bob:s3cr3t@db/x", "s3cr3t"),
        ("clone with ghp_0123456789abcdefghijABCDEFGHIJ", "ghp_0123"),
    ],
)
def test_a_secret_does_not_survive(text: str, secret: str) -> None:
    assert secret not in redact(text)
    assert MASK in redact(text)


@pytest.mark.parametrize(
    "text", ["RuntimeError: shape [2, 3] invalid for input of size 7", "tokens per second fell", "step 7: loss = nan"]
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@given(st.text(max_size=300))
def test_any_text_is_taken(text: str) -> None:
    assert isinstance(redact(text), str)


@pytest.mark.parametrize("char", ["a", "-", "token", " ", "=", "://", "a:", "secret="])
def test_no_text_makes_it_slow(char: str) -> None:
    begin_s = time.process_time()
    redact((char * 16_384)[:16_384])
    assert time.process_time() - begin_s < 0.5
