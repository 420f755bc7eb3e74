"""Command line values, with one time syntax for all commands: invalid ones are rejected in a line that says why."""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.names import did_you_mean
from eagle_eye.schema.times import SHORT_FORMS, length_s, option_time


class FunctionCommand(NamedTuple):
    """A command of two functions, where its module holds several commands (``main.Subcommand``)."""

    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_span(parser: argparse.ArgumentParser, since: str, until: str = "") -> None:
    """Add ``--since`` and, with a text for it, ``--until``; the texts describe the defaults."""
    required = not since
    what = "from when on" if required else f"from when on (default {since})"
    parser.add_argument("--since", metavar="TIME", required=required, help=f"{what}: {SHORT_FORMS}")
    if until:
        parser.add_argument("--until", metavar="TIME", help=f"until when (default {until}), written likewise")


def moment(flag: str, text: str, now_s: float) -> float:
    """Return the Unix seconds of a flag's time. Raises ConfigurationError."""
    try:
        return option_time(text, now_s)
    except ValueError as error:
        raise ConfigurationError(f"{flag}: {error}") from None


def span(args: argparse.Namespace, now_s: float | None = None) -> tuple[float | None, float | None]:
    """Return since and until as Unix seconds, None where one is not given. Raises ConfigurationError.

    Rejects a range that starts in the future or not before its end: its answer would be empty, and look healthy.
    """
    now_s = time.time() if now_s is None else now_s
    until = getattr(args, "until", None)
    since_s = None if args.since is None else moment("--since", args.since, now_s)
    until_s = None if until is None else moment("--until", until, now_s)
    end_s = now_s if until_s is None else until_s
    if since_s is not None and since_s >= end_s:
        before = f"--until, {until!r}" if until_s is not None else "now"
        raise ConfigurationError(f"--since: expected a time before {before}, got {args.since!r}")
    return since_s, until_s


def required_span(args: argparse.Namespace, now_s: float) -> tuple[float, float]:
    """Return since and until, by default now. Raises ConfigurationError."""
    since_s, until_s = span(args, now_s)
    return now_s if since_s is None else since_s, now_s if until_s is None else until_s


WRONG_USAGE = 2
LINE_CHARS_MAX = 3_000  # per message: some list all known names
SHOWN_CHARS_MAX = 80  # of an invalid value


class CommandLineParser(argparse.ArgumentParser):
    """Argparse with one-line errors, suggestions, and ages such as -2h as values. Subparsers are of the same class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Otherwise argparse takes "-15m" for an option.
        self._negative_number_matcher = re.compile(r"^-\d+$|^-\d*\.\d+$|^-\d+(?:\.\d+)?[smhdw]$")

    def error(self, message: str) -> NoReturn:
        """Write one line and exit with code 2."""
        sys.stderr.write(f"{self.prog}: {one_line(message)}; see {self.prog} --help\n")
        raise SystemExit(WRONG_USAGE)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the arguments; an unknown option's error suggests the likely one."""
        words = sys.argv[1:] if args is None else list(args)
        # Before argparse takes its value for a verb. The end of some command lines is not ours.
        if not any(action.nargs == argparse.REMAINDER for action in self._actions):
            known = {*options(self)}
            for word in itertools.takewhile(lambda word: word != "--", words):
                option = word.partition("=")[0]
                if option.startswith("--") and not any(one.startswith(option) for one in known):
                    self._unknown(option)
        found, unknown = self.parse_known_args(words, namespace)
        if unknown:
            self._unknown(next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0])
        return found

    def _unknown(self, word: str) -> NoReturn:
        kind = "option" if word.startswith("-") else "argument"
        self.error(f"{kind} {shown(word)} is unknown{did_you_mean(word, options(self))}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            name = action.metavar if isinstance(action.metavar, str) else action.dest
            where = "/".join(action.option_strings) or str(name)
            meant = did_you_mean(str(value), known)
            self.error(f"{where}: {shown(str(value))} is unknown; expected one of {', '.join(known)}{meant}")


def one_line(message: str) -> str:
    """Return an error message as one line of bounded length without control characters."""
    line = " ".join("".join(char if char.isprintable() else " " for char in message).split())
    return line if len(line) <= LINE_CHARS_MAX else f"{line[: LINE_CHARS_MAX // 2]} ... {line[-LINE_CHARS_MAX // 2 :]}"


def shown(text: str) -> str:
    """Return an invalid value for a message."""
    return repr(text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "...")


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options of the parser and of its subparsers."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options(inner)


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of integers between the two."""

    def read(text: str) -> int:
        try:
            found = int(text) if len(text) <= 20 else None
        except ValueError:
            found = None
        if found is None or not least <= found <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {shown(text)}")
        return found

    return read


def length(text: str) -> float:
    """Return the seconds of a length of time, such as 90m, 4h or 7d."""
    try:
        return length_s(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a length such as 90m, 4h or 7d, got {shown(text)}") from None


def number(least: float, most: float) -> Callable[[str], float]:
    """Return a parser of numbers between the two."""

    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not least <= found <= most:
            raise argparse.ArgumentTypeError(f"expected a number from {least:g} to {most:g}, got {shown(text)}")
        return found

    return read
