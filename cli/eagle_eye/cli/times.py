"""``--since`` and ``--until``: one time syntax for every command."""

from __future__ import annotations

import argparse
import time

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.times import SHORT_FORMS, option_time


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
