"""``eagle-eye sessions end PERSON``: sign a person out everywhere, whichever browsers they signed in with."""

from __future__ import annotations

import argparse
import sys

from eagle_eye.cli.client import connect
from eagle_eye.cli.operator import add_common, print_json
from eagle_eye.cli.tables import printable


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's verb and flags."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    end = verbs.add_parser("end", help="end all of a person's sessions; they can sign in again")
    end.add_argument("person", metavar="PERSON", help="the name with which they sign in, as in eagle-eye audit")
    add_common(end, None)


def run(args: argparse.Namespace) -> int:
    """End the sessions and say since when they are over. Raises ClientError."""
    body = {"person": args.person.removeprefix("user:")}
    ended = connect(args.server, args.token_file).call("POST", "/api/v1/sessions/end", body=body)
    if args.json:
        print_json(ended)
        return 0
    sys.stdout.write(f"sessions of {printable(ended['person'])} begun by {printable(ended['ended'])} are over\n")
    return 0
