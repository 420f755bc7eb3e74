"""``eagle-eye cells``: which server judges which jobs, where several share the records."""

from __future__ import annotations

import argparse
import sys
from typing import Any
from urllib.parse import quote

from eagle_eye.cli.client import connect
from eagle_eye.cli.operator import add_common, print_json, print_list
from eagle_eye.cli.tables import Column, printable

PATH = "/api/v1/cells"
_COLUMNS = (
    Column("cell", "cell"),
    Column("leads", "leads"),
    Column("server", "url", 2),
    Column("epoch", "epoch", 3),
    Column("jobs", "jobs"),
    Column("nodes", "nodes"),
    Column("drained", "drained", 4),
    Column("updated", "updated", 1),
    Column("problem", "problem"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs and their flags; without a verb it lists."""
    common = argparse.ArgumentParser(add_help=False)
    add_common(common, argparse.SUPPRESS)
    add_common(parser, None)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=False)
    verbs.add_parser("list", parents=[common], help="the cells, their leaders, and how much each has (default)")
    move = verbs.add_parser("move", parents=[common], help="have another cell judge a job; its agents go there")
    move.add_argument("job", metavar="JOB", help="the job's name")
    move.add_argument("cell", metavar="CELL", help="the cell that is to judge it")
    move.add_argument("--force", action="store_true", help="although an incident or an action of it is open")
    for verb, text in (
        ("drain", "give it no new jobs, and have others judge those that it has"),
        ("fill", "give it new jobs again, after it was drained"),
    ):
        one = verbs.add_parser(verb, parents=[common], help=text)
        one.add_argument("cell", metavar="CELL", help="its name, as listed")


def run(args: argparse.Namespace) -> int:
    """Ask the server and print its answer. Raises ClientError."""
    client = connect(args.server, args.token_file)
    if args.verb in (None, "list"):
        print_list(args, _COLUMNS, client.call("GET", PATH)["items"], more=False)
        return 0
    cell = f"{PATH}/{quote(args.cell, safe='')}"
    if args.verb == "move":
        query = {"force": "true"} if args.force else {}
        answer: Any = client.call("POST", f"{cell}/jobs/{quote(args.job, safe='')}", query)
        said = f"cell {printable(answer['cell'])} judges {printable(answer['job'])} from now on"
    else:
        answer = client.call("POST", f"{cell}/{args.verb}")
        said = f"{args.verb} {printable(args.cell)}: done"
        if args.verb == "drain":
            said = f"{len(answer['moved'])} jobs moved"
            if answer["stays"]:
                said += f"; {printable(answer['stays'])} stay while something of theirs is open: drain again then"
    if args.json:
        print_json(answer)
    else:
        sys.stdout.write(f"{said}\n")
    return 0
