"""``eagle-eye audit``: who changed what, people, subscribers and the server itself alike."""

from __future__ import annotations

import argparse

from eagle_eye.cli.client import connect
from eagle_eye.cli.operator import LIST_MAX, add_common, print_list
from eagle_eye.cli.tables import Column

COLUMNS = (
    Column("time", "time"),
    Column("who", "who"),
    Column("what", "verb"),
    Column("of", "subject"),
    Column("detail", "detail"),
)
FILTERS = ("subject", "who", "verb", "since")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add_common(parser, None)
    parser.add_argument("--limit", type=int, default=LIST_MAX, help=f"how many at most (default {LIST_MAX})")
    parser.add_argument("--subject", metavar="ID", help="only what was done to this incident, action, node, token ...")
    parser.add_argument("--who", help="only what this token, local, server or configuration did")
    parser.add_argument("--verb", help="only this: open, confirm, act, approve, resolve, reload ...")
    parser.add_argument("--since", metavar="TIME", help="RFC 3339 or Unix seconds")


def run(args: argparse.Namespace) -> int:
    """Print the entries, newest first. Raises ServerSaidNo."""
    query = {name: getattr(args, name) for name in FILTERS}
    items, more = connect(args.server, args.token_file).pages("/api/v1/audit", query, max(1, args.limit))
    print_list(args, COLUMNS, items, more)
    return 0
