"""Configuration: file, then environment, then flags; what is unknown or wrong names itself."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from eagle_eye.agent.config import AgentConfiguration
from eagle_eye.orchestrators.orchestrate.settings import add_shared
from eagle_eye.schema.configuration import READ_ELSEWHERE, ConfigurationError, load, masked, mistyped_variable
from eagle_eye.server.config import ServerConfig


class Inner(msgspec.Struct, frozen=True):
    mode: Literal["a", "b"] = "a"
    limit_s: float = 1.0
    names: list[str] = []
    watch: bool = False
    size_bytes_max: Annotated[int, msgspec.Meta(ge=1)] = 1


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
        ('[inner]\nmode = "c"', "inner.mode: expected one of 'a', 'b', got 'c'"),
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


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("limit_s", "5m", "inner.limit_s: expected seconds as a number, for example limit_s = 300, got '5m'"),
        ("limit_s", "1.5h", "for example limit_s = 5400, got '1.5h'"),
        ("limit_s", "soon", "for example limit_s = 300, got 'soon'"),
        ("size_bytes_max", "64MiB", "expected bytes as a number, for example size_bytes_max = 67108864, got '64MiB'"),
        ("mode", "bananas", "inner.mode: expected one of 'a', 'b', got 'bananas'"),
        ("watch", "yes", "inner.watch: expected true or false, got 'yes'"),
    ],
)
def test_a_wrong_value_names_the_key_what_was_expected_and_what_came(
    tmp_path: Path, key: str, value: str, said: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load(Shape, write(tmp_path, f'[inner]\n{key} = "{value}"'), {}, {})
    assert said in str(refused.value)
    if key != "watch":
        variable = f"EAGLE_EYE_INNER_{key.upper()}"
        with pytest.raises(ConfigurationError) as refused:
            load(Shape, None, {variable: value}, {})
        assert f"environment variable {variable} (inner.{key}): expected" in str(refused.value)
        assert said.partition(": ")[2] in str(refused.value)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("lisen = 1", "listen"),
        ("[inner]\nmoed = 1", "inner.mode"),
        ("[iner]\nmode = 1", "inner"),
        ("limit_s = 1", "inner.limit_s"),
    ],
)
def test_an_unknown_key_is_told_which_may_be_meant(tmp_path: Path, text: str, meant: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load(Shape, write(tmp_path, text), {}, {})
    assert f"did you mean {meant}" in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("EAGLE_EYE_LISTN", "EAGLE_EYE_LISTEN"),
        ("EAGLE_EYE_LITSEN", "EAGLE_EYE_LISTEN"),
        ("EAGLE_EYE_INNERMODE", "EAGLE_EYE_INNER_MODE"),
        ("EAGLE_EYE_INNER_MOD", "EAGLE_EYE_INNER_MODE"),
        ("EAGLE_EYE_TOKENS", "EAGLE_EYE_TOKEN"),
    ],
)
def test_a_variable_that_is_nearly_a_known_one_is_an_error(variable: str, meant: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load(Shape, None, {variable: "x"}, {})
    assert variable in str(refused.value)
    assert str(refused.value).endswith(f"did you mean {meant}?")


def test_other_unknown_variables_are_ignored_and_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert load(Shape, None, {"EAGLE_EYE_COLOUR": "blue", "EAGLE_EYE_ZOO": "", "PATH": "/"}, {}) == Shape()
    (record,) = caplog.records
    assert record.getMessage().endswith("EAGLE_EYE_COLOUR, EAGLE_EYE_ZOO")


SERVICES = {
    f"EAGLE_EYE_{name}{suffix}": value
    for name in ("", "SERVER_", "AGENT_", "INNER_", "LISTEN_", "POLICY_", "LOG_", "TLS_")
    for suffix, value in {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "8470",
        "SERVICE_PORT_HTTP": "8470",
        "PORT": "tcp://10.0.0.1:8470",
        "PORT_8470_TCP": "tcp://10.0.0.1:8470",
        "PORT_8470_TCP_PROTO": "tcp",
        "PORT_8470_TCP_PORT": "8470",
        "PORT_8470_TCP_ADDR": "10.0.0.1",
    }.items()
}


@pytest.mark.parametrize("shape", [Shape, ServerConfig, AgentConfiguration])
def test_what_kubernetes_says_of_services_is_no_error_and_makes_no_noise(
    shape: type[msgspec.Struct], caplog: pytest.LogCaptureFixture
) -> None:
    assert load(shape, None, SERVICES, {}) == shape()
    assert not caplog.records


def test_no_parts_variable_is_an_error_to_another_part() -> None:
    roots = {key for shape in (ServerConfig, AgentConfiguration) for key in shape.__struct_fields__}
    parser = argparse.ArgumentParser()
    add_shared(parser)
    roots |= {action.dest for action in parser._actions}
    known = {f"EAGLE_EYE_{key.upper()}" for key in roots} | READ_ELSEWHERE
    for shape in (ServerConfig, AgentConfiguration):
        ours = {f"EAGLE_EYE_{key.upper()}" for key in shape.__struct_fields__}
        assert mistyped_variable(dict.fromkeys(known, "x"), ours, warn=False) == ""
    assert mistyped_variable(dict.fromkeys(known, "x"), {"EAGLE_EYE_SERVER", "EAGLE_EYE_TOKEN_FILE"}, warn=False) == ""


def test_every_variable_that_the_code_names_is_known_to_be_read_somewhere() -> None:
    keys = {f"EAGLE_EYE_{key.upper()}" for key in AgentConfiguration.__struct_fields__}
    root = Path(__file__).parents[2]
    named = {
        name
        for room in (
            "agent",
            "checks",
            "checkpoint",
            "cli",
            "client",
            "demo",
            "learning",
            "orchestrators",
            "planning",
            "server",
            "simulator",
        )
        for path in (root / room).rglob("*.py")
        for name in re.findall(r'"(EAGLE_EYE_[A-Z_]+[A-Z])"', path.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert named - READ_ELSEWHERE - keys == set()
