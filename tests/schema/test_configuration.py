"""Configuration: file, then environment, then flags; what is unknown or wrong names itself."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import pytest

from eagle_eye.schema.configuration import ConfigurationError, load, masked


class Inner(msgspec.Struct, frozen=True):
    mode: Literal["a", "b"] = "a"
    limit_s: float = 1.0
    names: list[str] = []


class Shape(msgspec.Struct, frozen=True):
    listen: str = "here"
    token: str = ""
    inner: Inner = Inner()


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return path


def test_defaults_hold_without_anything() -> None:
    assert load(Shape, None, {}, {}) == Shape()


def test_environment_goes_over_the_file_and_flags_over_both(tmp_path: Path) -> None:
    file = write(tmp_path, 'listen = "file"\n[inner]\nmode = "b"\nlimit_s = 2.0\n')
    environ = {"EAGLE_EYE_LISTEN": "environment", "EAGLE_EYE_INNER_LIMIT_S": "3"}
    got = load(Shape, file, environ, {"listen": "flag", "token": None})
    assert got == Shape("flag", "", Inner("b", 3.0))


def test_lists_come_from_the_environment_as_json() -> None:
    assert load(Shape, None, {"EAGLE_EYE_INNER_NAMES": '["x", "y"]'}, {}).inner.names == ["x", "y"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("lisen = 1", "lisen"),
        ("[inner]\nmoed = 1", "inner.moed"),
        ('[inner]\nmode = "c"', "inner.mode: Invalid enum value 'c', expected one of 'a', 'b'"),
        ("inner = 3", "inner"),
        ("listen = 3", "listen"),
        (
            '[inner]\nlimit_s = "2026-03-01T02:00:00+00:00"',
            "inner.limit_s: .*a date-time of TOML stands without quotes",
        ),
        ("listen", "not TOML"),
    ],
)
def test_a_wrong_file_names_the_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        load(Shape, write(tmp_path, text), {}, {})


def test_an_unknown_key_says_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"inner\.limit_s, inner\.mode"):
        load(Shape, write(tmp_path, "[inner]\nlimit = 1"), {}, {})


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        load(Shape, tmp_path / "none.toml", {}, {})


def test_secrets_are_masked_when_printed() -> None:
    assert masked(Shape(token="sesame"))["token"] == "********"


def test_an_unknown_variable_is_told_what_its_section_knows() -> None:
    with pytest.raises(ConfigurationError) as refused:
        load(Shape, None, {"EAGLE_EYE_INNER_LIMIT": "3"}, {})
    assert "EAGLE_EYE_INNER_LIMIT is unknown" in str(refused.value)
    assert "EAGLE_EYE_INNER_LIMIT_S" in str(refused.value)
    assert "EAGLE_EYE_LISTEN" not in str(refused.value)
