"""A documented command line is given to the parser that would read it, which alone decides."""

from __future__ import annotations

import argparse
import importlib.util
import io
import re
import runpy
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NoReturn
from unittest import mock

from eagle_eye.cli.arguments import CommandLineParser
from eagle_eye.cli.main import COMMANDS, load
from eagle_eye.orchestrators.orchestrate import settings
from eagle_eye.orchestrators.orchestrate.settings import KINDS
from eagle_eye.schema.configuration import ConfigurationError
from tests.docs.pages import ROOT

# What stands for something of the reader's, and a value of its kind. Words that are none of them are a mistake.
PLACEHOLDERS = {
    **dict.fromkeys(("N", "S", "M", "T", "P", "PORT"), "4"),
    **dict.fromkeys(("JOB", "J", "NODE", "INCIDENT", "ACTION", "ID", "ID_OF_A", "NAME", "WHO", "W", "VERB", "V"), "x1"),
    **dict.fromkeys(
        ("BACKUP", "DIR", "FILE", "FOLDER", "OUT", "TRACE", "DUMPS", "F", "R", "TEXT", "REASON", "MODEL"), "x1"
    ),
    **dict.fromkeys(("URL", "SERVER"), "http://127.0.0.1:8470"),
    "TIME": "2026-01-31T12:00:00Z",
    "GLOB": "gpu-*",
    "CELL": "west",
    "SCOPE": "read",
    "STATE": "open",
    "FAULT": "hang",
    "KIND": "command",
}
OURS = ("benchmarks", "tests", "dashboards", "release", "eagle_eye")
_PLACEHOLDER = re.compile(r"(?<![\w$%{-])[A-Z]+(?![\w-])")


class WrongCommandLine(Exception):
    """The parser refused it; the message is the parser's."""


class _Read(Exception):
    """A program's parser has read its arguments: nothing of the program need run any more."""


class _Parser(CommandLineParser):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{**more, "allow_abbrev": False})  # a document names a flag in full

    def error(self, message: str) -> NoReturn:
        raise WrongCommandLine(f"{self.prog}: {message}")


def filled(word: str, values: dict[str, str] | None = None) -> str:
    """Return a word with its placeholders replaced. Raises WrongCommandLine for one that nobody knows."""
    values = PLACEHOLDERS if values is None else values
    url = re.sub(r"https?://(SERVER|HOST)\b", "http://server", word)

    def value(found: re.Match[str]) -> str:
        if found[0] not in values:
            known = ", ".join(values)
            raise WrongCommandLine(
                f"placeholder {found[0]} is unknown; expected one of {known} (tests/docs/parsing.py)"
            )
        return values[found[0]]

    return _PLACEHOLDER.sub(value, url)


def check_eagle_eye(arguments: list[str], *, whole: bool = True) -> None:
    """Raise WrongCommandLine where ``eagle-eye`` would refuse the arguments; ``whole`` False: some may be missing."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name in ("", "--version", "--help", "-h"):
        return
    command = next((known for known in COMMANDS if known.name == name), None)
    if command is None:
        raise WrongCommandLine(f"eagle-eye has no command {name!r}")
    parser = _Parser(prog=f"eagle-eye {name}")
    load(command).configure(parser)
    place = rest.index("--") if "--" in rest else len(rest)  # what follows is another program's
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            read = parser.parse_args([*map(filled, rest[:place]), *rest[place:]])
            if name == "orchestrate":
                _check_kind(read.kind, [*read.options])
    except SystemExit as leaving:
        if leaving.code:
            raise WrongCommandLine(f"eagle-eye {name}: exit code {leaving.code}") from None
    except WrongCommandLine as error:
        if whole or "arguments are required" not in str(error):
            raise


def _check_kind(name: str, options: list[str]) -> None:
    kind = next((known for known in KINDS if known.name == name), None)
    if kind is None:
        raise WrongCommandLine(f"eagle-eye orchestrate has no kind {name!r}")
    try:
        settings.read(kind, options, {})
    except ConfigurationError as error:
        missing = re.search(r"is needed|is missing|cannot be read|required", str(error))
        if not missing:
            raise WrongCommandLine(str(error)) from None


def check_program(program: str, arguments: list[str], *, whole: bool = True) -> None:
    """Raise WrongCommandLine where a module (``a.b``) or file (``a/b.py``) would refuse the arguments; it does not run.

    Of modules that are not ours, and where arguments may be missing (``whole`` False), only that there is such a one.
    """
    file = program.endswith(".py")
    if not (ROOT / program).is_file() if file else importlib.util.find_spec(program) is None:
        raise WrongCommandLine(f"there is no {program}")
    if not whole or (not file and program.partition(".")[0] not in OURS):
        return
    parse = argparse.ArgumentParser.parse_args

    def read(parser: argparse.ArgumentParser, *_args: Any, **_more: Any) -> NoReturn:
        parse(parser, [filled(word) for word in arguments])
        raise _Read

    said = io.StringIO()
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", read),
        mock.patch.object(sys, "argv", [program, *arguments]),
        mock.patch.object(sys, "path", [str((ROOT / program).parent), *sys.path] if file else sys.path),
        redirect_stderr(said),
        warnings.catch_warnings(action="ignore", category=RuntimeWarning),  # that a test has imported it before
    ):
        try:
            if file:
                runpy.run_path(str(ROOT / program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=False)
        except _Read:
            return
        except SystemExit as leaving:
            if leaving.code:
                raise WrongCommandLine(said.getvalue().strip() or f"{program}: exit code {leaving.code}") from None
        except ImportError as error:
            raise WrongCommandLine(str(error)) from None
