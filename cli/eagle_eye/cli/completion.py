"""The command ``eagle-eye completion``: a script that completes commands in bash, zsh or fish.

It is made by shtab from the parsers of the commands that can be loaded here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import shtab

from eagle_eye.cli import main as cli

SHELLS = ("bash", "zsh", "fish")
_FOLDERS = ("DIR", "FOLDER")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = "Prints a script with which your shell completes eagle-eye's commands, options and files."
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to read the script")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    sys.stdout.write(script(args.shell))
    return 0


def script(shell: str) -> str:
    """Return the script; commands whose libraries are not installed are completed by their names alone."""
    return shtab.complete(whole_parser(), shell)


def whole_parser() -> argparse.ArgumentParser:
    """Return a parser of all commands; paths complete files, or folders where the value's name says so."""
    whole = argparse.ArgumentParser(prog="eagle-eye")
    whole.add_argument("--version", action="version", version="", help="show the version")
    commands = whole.add_subparsers(dest="command")
    for command in cli.COMMANDS:
        parser = commands.add_parser(command.name, help=command.help)
        try:
            cli.load(command).configure(parser)
        except ModuleNotFoundError:
            continue
        _complete_paths(parser)
    return whole


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _complete_paths(below)
        elif action.type is Path:
            found: Any = action  # shtab reads an attribute that argparse does not declare
            found.complete = shtab.DIRECTORY if action.metavar in _FOLDERS else shtab.FILE
