"""``eagle-eye silences``: for a time, no news is sent of a fault, a job or a node."""

from __future__ import annotations

import argparse
import sys
from typing import Any, get_args

from eagle_eye.cli.arguments import length
from eagle_eye.cli.client import connect
from eagle_eye.cli.operator import ANY, Noun, Verb, print_json
from eagle_eye.cli.tables import Column, printable
from eagle_eye.server.api.filter_values import FAULT_NAMES
from eagle_eye.server.model.records import SilenceState


class Silences(Noun):
    """Silences, one of which is made with more than a name."""

    def _add_verbs(self, verbs: Any, common: argparse.ArgumentParser) -> None:
        add = verbs.add_parser("add", parents=[common], help="send nobody news of a fault, job or node for a time")
        several: dict[str, Any] = {"action": "append", "default": []}
        text = "only news of this fault; may be repeated; docs/reference/faults.md has them"
        add.add_argument("--fault", **several, dest="faults", metavar="FAULT", choices=FAULT_NAMES, help=text)
        for name in ("job", "node"):
            text = f"only news of this {name}, or a glob; may be repeated"
            add.add_argument(f"--{name}", **several, dest=f"{name}s", metavar=name.upper(), help=text)
        text = "how long: 90m, 4h, 7d; at most 30d"
        add.add_argument("--for", required=True, type=length, dest="seconds", metavar="TIME", help=text)
        add.add_argument("--reason", required=True, help="kept with it, for those who ask why they were not told")

    def run(self, args: argparse.Namespace) -> int:
        """Ask the server and print its answer. Raises ClientError."""
        if args.verb != "add":
            return super().run(args)
        body = {name: getattr(args, name) for name in ("faults", "jobs", "nodes", "seconds", "reason")}
        made = connect(args.server, args.token_file).call("POST", "/api/v1/silences", body=body)
        if args.json:
            print_json(made)
            return 0
        many = len(made["incidents"])
        now = f"; it silences {many} open {'incident' if many == 1 else 'incidents'}" if many else ""
        sys.stdout.write(f"{printable(made['id'])} until {printable(made['until'])}{now}\n")
        sys.stdout.write("actions go on; a maintenance window holds them (docs/reference/policy.md)\n")
        return 0


SILENCES = Silences(
    "silences",
    "silence",
    (
        Column("silence", "id"),
        Column("state", "state"),
        Column("until", "until"),
        Column("faults", "faults"),
        Column("jobs", "jobs"),
        Column("nodes", "nodes"),
        Column("by", "by"),
        Column("reason", "reason", 1),
        Column("silences now", "incidents", 2),
        Column("ended by", "ended_by", 3),
    ),
    filters={"state": get_args(SilenceState), "job": ANY, "node": ANY},
    verbs=(Verb("end", "end it before its time; what it withheld and still goes on is sent"),),
)
