from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_eye.orchestrators import command_line
from eagle_eye.orchestrators.orchestrate import settings
from eagle_eye.orchestrators.orchestrate.settings import KINDS
from eagle_eye.orchestrators.protocol import OrchestratorError
from eagle_eye.schema.configuration import ConfigurationError

COMMAND = next(kind for kind in KINDS if kind.name == "command")


def read(*flags: str, **environ: str) -> argparse.Namespace:
    return settings.read(COMMAND, [*flags, "--", "/bin/true", "--site", "A"], environ)


def test_defaults_are_those_of_the_flags() -> None:
    options = read()
    assert (options.server, options.listen) == ("http://127.0.0.1:8470", ("127.0.0.1", 8472))
    assert (options.jobs, options.dry_run, options.timeout) == ([], False, 300.0)
    assert options.program == ["--", "/bin/true", "--site", "A"]


def test_flags_come_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "orchestrate.toml"
    file.write_text(
        'server = "http://file:1"\nlisten = "[::1]:1"\njobs = ["a", "b"]\ndry_run = true\n[command]\ntimeout = 5\n'
        'env = ["A=1"]\n'
    )
    options = read("--config", str(file))
    assert (options.server, options.listen, options.jobs) == ("http://file:1", ("::1", 1), ["a", "b"])
    assert (options.dry_run, options.timeout, options.env) == (True, 5.0, ["A=1"])
    environ = {
        "EAGLE_EYE_CONFIG": str(file), "EAGLE_EYE_SERVER": "http://env:1", "EAGLE_EYE_JOBS": '["c"]',
        "EAGLE_EYE_DRY_RUN": "false", "EAGLE_EYE_COMMAND_TIMEOUT": "6",
    }  # fmt: skip
    options = read(**environ)
    assert (options.server, options.jobs, options.dry_run, options.timeout) == ("http://env:1", ["c"], False, 6.0)
    options = read("--server", "http://flag:1", "--jobs", "d", "--jobs", "e", "--dry-run", "--timeout=7", **environ)
    assert (options.server, options.jobs, options.dry_run, options.timeout) == ("http://flag:1", ["d", "e"], True, 7.0)


def test_the_program_can_stand_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "orchestrate.toml"
    file.write_text('[command]\nprogram = ["./jobs.py", "--site", "A"]\n')
    assert settings.read(COMMAND, ["--config", str(file)], {}).program == ["./jobs.py", "--site", "A"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("serverr = 'x'", r"unknown key serverr in .*; known here are .*server"),
        ("[command]\ntime = 5", r"unknown key command.time in .*timeout"),
        ("[comand]", "unknown key comand"),
        ("command = 5", "command: expected a section"),
        ("dry_run = 'yes'", "dry_run: expected true or false, got 'yes'"),
        ("jobs = 'a'", "jobs: expected a list"),
        ("jobs = [1.5, [2]]", "jobs: expected GLOB"),
        ("listen = 'here'", "listen: expected HOST:PORT, got 'here'"),
        ("[command]\ntimeout = 0", "command.timeout: expected seconds above 0, got '0'"),
        ("server", "is not TOML"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_key(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "orchestrate.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        read("--config", str(file))


def test_wrong_flags_and_variables_are_named() -> None:
    with pytest.raises(ConfigurationError, match="--listen: expected HOST:PORT"):
        read("--listen", "8472")
    with pytest.raises(ConfigurationError, match="EAGLE_EYE_POLL: expected seconds above 0, got 'soon'"):
        read(EAGLE_EYE_POLL="soon")
    with pytest.raises(ConfigurationError, match="EAGLE_EYE_COMMAND_TIMEUOT is unknown"):
        read(EAGLE_EYE_COMMAND_TIMEUOT="5")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read("--config", "/nowhere.toml")


@pytest.mark.parametrize(
    ("read_value", "good", "bad"),
    [
        (command_line.seconds, "0.5", ["0", "-1", "nan", "inf", "soon", ""]),
        (command_line.seconds_or_none, "0", ["-1", "nan", "inf", "soon"]),
        (command_line.positive, "1", ["0", "-3", "1.5", "many"]),
        (command_line.count, "0", ["-1", "1.5", ""]),
        (command_line.address, "[::1]:80", ["80", ":80", "host:", "host:65536", "host:-1", "host:x"]),
    ],
)
def test_a_value_that_is_none_is_named_with_what_was_expected(
    read_value: Callable[[str], object], good: str, bad: list[str]
) -> None:
    read_value(good)
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=rf"expected .*, got {re.escape(repr(text))}$"):
            read_value(text)


def test_a_token_is_one_line_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert command_line.token(None) == ""
    file.write_text("ee_secret\n")
    assert command_line.token(file) == "ee_secret"
    for content in (b"one\ntwo", "schl\u00fcssel".encode(), b"a\x00b"):
        file.write_bytes(content)
        with pytest.raises(OrchestratorError, match=r"--token-file .*: expected one line of ASCII"):
            command_line.token(file)
    with pytest.raises(OrchestratorError, match="No such file"):
        command_line.token(tmp_path / "none")


def test_every_kind_can_be_loaded_and_takes_no_shared_options_name() -> None:
    for kind in KINDS:
        parser = argparse.ArgumentParser()
        settings.add_shared(parser)
        kind.load().add_options(parser)
        assert kind.help
