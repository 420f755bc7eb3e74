from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.redact import MASK, redact, redact_arguments, redact_environment


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
        ("train.py --hf-token abcdefgh --lr 1", "abcdefgh"),
        ("train.py --password 'two words'", "two words"),
        ("https://x.blob.example/y?sv=1&sig=aB%2Bc%3D&se=2", "aB%2Bc"),
        ("https://0123456789abcdef0123@host/simple", "0123456789abcdef"),
        ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3.dozjgNryP4J3jVm", "eyJzdWIi"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----", "MIIEow"),
        ("DB_PASS=letmein", "letmein"),
        ("SENTRY_DSN=https://abc@sentry.example/1", "abc@"),
        ("tokens: s3cret", "s3cret"),
        ("Authorization: Bearer ee_0123456789012345678901234567890123456789", "ee_0123"),
    ],
)
def test_a_secret_does_not_survive(text: str, secret: str) -> None:
    assert secret not in redact(text)
    assert MASK in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: shape [2, 3] invalid for input of size 7",
        "tokens per second fell",
        "step 7: loss = nan",
        "train.py --max-tokens 4096 --tokens-per-step=1.5e6 --tokenizer llama TOKENIZERS_PARALLELISM=true",
        "author=me PASSTHROUGH=1 compass: north",
        "ssh://git@github.com/x",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@given(st.text(max_size=300))
def test_any_text_is_taken(text: str) -> None:
    assert isinstance(redact(text), str)


def test_a_value_that_is_an_argument_of_its_own_is_masked_whatever_it_looks_like() -> None:
    arguments = [
        "train.py",
        "--password",
        "two words",
        "--secret",
        "-dash",
        "--max-tokens",
        "12",
        "API_KEY=x",
        "-p",
        "x",
    ]
    assert redact_arguments(arguments) == [
        *("train.py", "--password", MASK, "--secret", MASK, "--max-tokens", "12", f"API_KEY={MASK}", "-p", "x")
    ]


def test_a_switch_without_a_value_hides_nothing_that_follows() -> None:
    assert redact_arguments(["--use-auth", "--lr", "0.1"]) == ["--use-auth", "--lr", "0.1"]


def test_an_environment_is_masked_by_name_and_by_shape() -> None:
    variables = {
        "HF_TOKEN": "a b",
        "NCCL_DEBUG": "INFO",
        "X": "https://u:pw@h",
        "TOKENS_MAX": "12",
        "JWT": "e",
        "PW": "",
    }
    assert redact_environment(variables) == {
        "HF_TOKEN": MASK,
        "NCCL_DEBUG": "INFO",
        "X": f"https://{MASK}@h",
        "TOKENS_MAX": "12",
        "JWT": MASK,
        "PW": "",
    }


@given(st.lists(st.text(max_size=30), max_size=8))
def test_any_command_line_keeps_its_length(arguments: list[str]) -> None:
    assert len(redact_arguments(arguments)) == len(arguments)


@pytest.mark.parametrize(
    "char",
    [
        "a",
        "-",
        "token",
        " ",
        "=",
        "://",
        "a:",
        "secret=",
        "--",
        "--token ",
        "-----BEGIN ",
        "eyJaaaaaaaa.",
        "?sig=",
        "'",
        "_",
    ],
)
def test_no_text_makes_it_slow(char: str) -> None:
    begin_s = time.process_time()
    redact((char * 16_384)[:16_384])
    assert time.process_time() - begin_s < 0.5
