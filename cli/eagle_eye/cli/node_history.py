"""``eagle-eye nodes history NODE``: the history of one node."""

from __future__ import annotations

import argparse
import sys
from typing import Any
from urllib.parse import quote

from eagle_eye.cli.operator import add_limit, print_json, say_more
from eagle_eye.cli.show import recurrence_words
from eagle_eye.cli.tables import Column, print_table, printable
from eagle_eye.client import Client

_CHAPTERS = (
    Column("time", "time"),
    Column("what", "kind"),
    Column("id", "id"),
    Column("summary", "summary"),
)
_GPUS = (
    Column("gpu", "device"),
    Column("uuid", "uuid"),
    Column("model", "model"),
    Column("since", "since"),
    Column("before", "before"),
    Column("compared", "compared"),
)


def add_history(verbs: Any, common: argparse.ArgumentParser) -> None:
    """Add the verb."""
    history = verbs.add_parser("history", parents=[common], help="what happened to it: incidents, repairs, GPUs, ...")
    history.add_argument("id", metavar="NODE", help="the node's name")
    add_limit(history)


def show_history(client: Client, args: argparse.Namespace) -> int:
    """Print the node's memory, its GPUs and its chapters. Raises ClientError."""
    path = f"/api/v1/nodes/{quote(args.id, safe='')}/history"
    first = client.call("GET", path, {"limit": 1})
    items, more = client.pages(path, {}, args.limit)
    if args.json:
        print_json({**first, "items": items, "next": None})
        return 0
    remembered = first["memory"]
    sys.stdout.write(
        f"{printable(first['node'])} is {first['state']}; {recurrence_words(remembered)};"
        f" incidents in 30 days: {remembered['incidents_30_days']}\n"
    )
    for signal in remembered["recurrence_signals"]:
        name = signal["signal"].replace("_", " ")
        usual = f" (usual here: {signal['usual']:g})" if signal["usual"] else ""
        sys.stdout.write(f"  {name} {signal['value']:g}{usual} adds {signal['adds']:.2f}\n")
    if first["gpus"]:
        sys.stdout.write("\n")
        checks = {one["uuid"]: compared_words(one) for one in first["gpu_checks"]}
        gpus = (
            {**gpu, "before": [seat["node"] for seat in gpu["moves"]], "compared": checks.get(gpu["uuid"], "never")}
            for gpu in first["gpus"]
        )
        print_table(_GPUS, list(gpus))
    sys.stdout.write("\n")
    print_table(_CHAPTERS, items)
    say_more(args, more)
    if first["cut"]:
        sys.stderr.write(f"older ones are not shown: {', '.join(first['cut'])}\n")
    return 0


def compared_words(checks: Any) -> str:
    """Return the results of a GPU's checks for silent corruption, as text: no findings are no proof."""
    found = f"{checks['wrong_numbers']:.0f} wrong numbers" if checks["wrong_numbers"] else "nothing found"
    return f"{found} in {checks['operations']:.0f} products, {checks['seconds']:.0f} s"
