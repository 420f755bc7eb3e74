"""``eagle-eye checkpoint``: one file per verb."""

from __future__ import annotations

import argparse
from typing import Protocol

from eagle_eye.checkpoint import plan_command, status_command, store_command, verify_command


class VerbModule(Protocol):
    """The interface of a verb's module. Extras are imported on run: help and planning need none."""

    @property
    def NAME(self) -> str:  # noqa: N802 - a module's constant
        """The verb's name."""
        ...

    @property
    def HELP(self) -> str:  # noqa: N802
        """Its help, in one line."""
        ...

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the verb's flags."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Run the verb and return the exit code."""
        ...


VERBS: tuple[VerbModule, ...] = (store_command, status_command, verify_command, plan_command)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs and their flags."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in VERBS:
        verb.configure(verbs.add_parser(verb.NAME, help=verb.HELP))


def run(args: argparse.Namespace) -> int:
    """Run the chosen verb. Raises ConfigurationError."""
    return {verb.NAME: verb for verb in VERBS}[args.verb].run(args)
