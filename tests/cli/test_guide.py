from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.cli import guide, main
from eagle_eye.orchestrators.orchestrate import settings
from eagle_eye.orchestrators.orchestrate.settings import KINDS

PAGES = Path(__file__).parents[2] / "docs"
EXAMPLES = [(name, command) for name, said in guide.GUIDES.items() for command, _why in said.examples]
by_name = pytest.mark.parametrize("command", main.COMMANDS, ids=lambda command: command.name)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and those of its verbs."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


def test_every_command_has_a_guide_and_no_guide_is_left_over() -> None:
    assert set(guide.GUIDES) == {command.name for command in main.COMMANDS}


@pytest.mark.parametrize(("name", "line"), EXAMPLES, ids=[line for _name, line in EXAMPLES])
def test_the_commands_parser_takes_the_example(name: str, line: str) -> None:
    command = next(known for known in main.COMMANDS if known.name == name)
    words = shlex.split(line)
    assert words[:2] == ["eagle-eye", name]
    parser = main.parser_of(command, main.load(command))
    if "--help" not in words:
        parser.parse_args(words[2:])  # leaves with 2 where it refuses


@by_name
def test_help_says_what_for_gives_examples_exit_codes_and_pages_that_are_there(command: main.Command) -> None:
    shown = main.parser_of(command, main.load(command)).format_help()
    said = guide.GUIDES[command.name]
    assert said.purpose.endswith((".", "?"))
    assert said.examples
    for heading in ("examples:", "exit codes: 0 ", "read on: docs/"):
        assert heading in shown
    assert [page for page in said.pages if not (PAGES / f"{page}.md").is_file()] == []


@by_name
def test_every_option_of_every_verb_says_what_it_is(command: main.Command) -> None:
    silent = [
        f"{parser.prog} {action.option_strings or action.dest}"
        for parser in parsers(main.parser_of(command, main.load(command)))
        for action in parser._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction)
    ]
    assert silent == []


@by_name
def test_every_verb_says_what_it_does(command: main.Command) -> None:
    shown = {parser.prog: parser.description for parser in parsers(main.parser_of(command, main.load(command)))}
    assert [prog for prog, said in shown.items() if not said or not said[0].isupper() or said[-1] not in ".?"] == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_option_of_an_orchestrator_says_what_it_is(kind: object) -> None:
    parser = argparse.ArgumentParser()
    settings.add_shared(parser)
    kind.load().add_options(parser)  # type: ignore[attr-defined]
    silent = [action.dest for action in parser._actions if not action.help and action.option_strings]
    assert silent == []
