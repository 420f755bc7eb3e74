"""``eagle-eye audit``: who changed what, including people, subscribers and the server itself."""

from __future__ import annotations

import argparse

from eagle_eye.cli.client import connect
from eagle_eye.cli.operator import add_common, add_limit, print_list
from eagle_eye.cli.tables import Column
from eagle_eye.cli.times import add_span, span

COLUMNS = (
    Column("time", "time"),
    Column("who", "who"),
    Column("what", "verb"),
    Column("of", "subject"),
    Column("detail", "detail"),
)
FILTERS = ("subject", "who", "verb")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add_common(parser, None)
    add_limit(parser)
    parser.add_argument("--subject", metavar="ID", help="only what was done to this incident, action, node, token ...")
    parser.add_argument("--who", help="only what this token, local, server or configuration did")
    parser.add_argument("--verb", help="only this: open, confirm, act, approve, resolve, reload ...")
    add_span(parser, since="the beginning")


def run(args: argparse.Namespace) -> int:
    """Print the entries, newest first. Raises ClientError, ConfigurationError."""
    since_s, _ = span(args)
    query = {**{name: getattr(args, name) for name in FILTERS}, "since": since_s}
    items, more = connect(args.server, args.token_file).pages("/api/v1/audit", query, args.limit)
    print_list(args, COLUMNS, items, more)
    return 0
