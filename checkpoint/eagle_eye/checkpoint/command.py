"""``eagle-eye checkpoint``: a verb a file."""

from __future__ import annotations

import argparse
from typing import Protocol

from eagle_eye.checkpoint import plan_command, status_command, store_command, verify_command


class Verb(Protocol):
    """What a verb's module offers. What the extra brings it loads when it runs: help and plans need none of it."""

    @property
    def NAME(self) -> str:  # noqa: N802 - a module's constant
        """What is typed."""
        ...

    @property
    def HELP(self) -> str:  # noqa: N802
        """What it does, in one line."""
        ...

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the verb's flags."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it and return the exit code."""
        ...


VERBS: tuple[Verb, ...] = (store_command, status_command, verify_command, plan_command)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs and their flags."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in VERBS:
        verb.configure(verbs.add_parser(verb.NAME, help=verb.HELP))


def run(args: argparse.Namespace) -> int:
    """Do what the verb says. Raises ConfigurationError."""
    return {verb.NAME: verb for verb in VERBS}[args.verb].run(args)
