"""``eagle-eye nodes``: the fleet's nodes, excluding and readmitting them, and their active checks."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any, get_args
from urllib.parse import quote

from eagle_eye.cli import show
from eagle_eye.cli.arguments import moment
from eagle_eye.cli.operator import (
    ANY,
    LIST_MAX,
    CannotGoOn,
    Noun,
    Verb,
    add_limit,
    connect,
    print_json,
    print_list,
    say_more,
)
from eagle_eye.cli.show import recurrence_words
from eagle_eye.cli.tables import Column, print_table, printable
from eagle_eye.client import Client
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.model.records import NodeState

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


POLL_S = 1.0
WAIT_BEYOND_S = 300.0  # beyond the check's own deadline: until it is started, and for its result to arrive
SDC_S, SDC_S_MAX = 60.0, 600.0  # as eagle-eye check --sdc
OPEN_STATES = ("asked", "running")
OUT_STATES = ("excluded", "draining")
ACCUSED_MAX = 1_000  # incidents read to tell which nodes are accused
EXIT_CODES = {"healthy": 0, "cannot_tell": 1, "sick": 3}  # as eagle-eye check

_REASON = ("reason",)
_CHECKS = (
    Column("check", "id"),
    Column("asked", "created"),
    Column("for", "purpose"),
    Column("fault", "fault"),
    Column("state", "state"),
    Column("detail", "detail"),
)
_OUTCOMES = (
    Column("check", "name"),
    Column("state", "state"),
    Column("seconds", "duration_s"),
    Column("reason", "reason"),
)


class NodeCommands(Noun):
    """Nodes, with verbs that may take minutes: a check, and a readmission that waits for one."""

    def _add_verbs(self, verbs: Any, common: argparse.ArgumentParser) -> None:
        readmit = verbs.add_parser("readmit", parents=[common], help="count it as in service again, after a check")
        readmit.add_argument("id", metavar="NODE", help="the node's name")
        readmit.add_argument("--reason", default="", help="reason to keep with it")
        readmit.add_argument(
            "--check", action="store_true", help="only after a passed check, whatever the settings say"
        )
        readmit.add_argument("--force", action="store_true", help="at once, whatever stands against it")
        check = verbs.add_parser("check", parents=[common], help="put it to work and say whether it is sick")
        check.add_argument("id", metavar="NODE", help="the node's name")
        check.add_argument("--reason", default="", help="reason to keep with it")
        check.add_argument("--sdc", action="store_true", help="look for silent data corruption alone")
        check.add_argument(
            "--seconds", type=float, metavar="S", help=f"how long --sdc looks, at most {SDC_S_MAX:g} ({SDC_S:g})"
        )
        for one in (readmit, check):
            one.add_argument("--no-wait", action="store_true", help="ask for the check and do not wait for it")
        add_history(verbs, common)
        checks = verbs.add_parser("checks", parents=[common], help="its active checks, newest first")
        checks.add_argument("id", metavar="NODE", help="the node's name")
        add_limit(checks)
        forget = verbs.add_parser("forget", parents=[common], help="count nodes as never heard of; their past stays")
        forget.add_argument(
            "nodes", metavar="NODE", nargs="*", default=[], help="names; none: all that the options name"
        )
        forget.add_argument("--unheard-for", metavar="TIME", help="those of which nothing was heard for so long, as 7d")
        forget.add_argument(
            "--introduced-by",
            metavar="TOKEN-ID",
            default="",
            help="those that this remote-write token named while nobody vouched for them",
        )
        forget.add_argument("--reason", default="", help="reason to keep in the audit trail")
        forget.add_argument("--dry-run", action="store_true", help="say which it would be, and change nothing")
        forget.add_argument(
            "--force", action="store_true", help="also those that are heard, out of service, or in an open incident"
        )

    def _listed(self, client: Client, query: Mapping[str, Any], limit: int) -> tuple[list[Any], bool]:
        """Return those that are out of service first, then those accused now (``accused_of``), then all others."""
        found, more = super()._listed(client, query, limit)
        if query.get("state"):
            return found, more
        nodes = {}
        for state in OUT_STATES:
            for node in super()._listed(client, {**query, "state": state}, limit)[0]:
                nodes[node["node"]] = node
        live, _ = client.pages("/api/v1/incidents", {"state": "live"}, ACCUSED_MAX)
        accused = {one["node"]: one["fault"] for one in reversed(live) if one["node"] is not None}
        listed = {node["node"]: node for node in found}
        for name in accused:
            if name in listed:
                nodes.setdefault(name, listed[name])
            elif more and name not in nodes and not query.get("cell"):
                nodes[name] = client.call("GET", f"/api/v1/nodes/{quote(name, safe='')}")
        nodes = {**nodes, **{name: node for name, node in listed.items() if name not in nodes}}
        first = [{**node, "accused_of": accused.get(name)} for name, node in nodes.items()]
        return first[:limit], more or len(first) > limit

    def run(self, args: argparse.Namespace) -> int:
        """Ask the server and print its answer. Raises ClientError."""
        if args.verb not in ("readmit", "check", "checks", "history", "forget"):
            return super().run(args)
        client = connect(args.server, args.token_file)
        if args.verb == "forget":
            return _forget(client, args)
        if args.verb == "history":
            return show_history(client, args)
        path = f"/api/v1/nodes/{quote(args.id, safe='')}"
        if args.verb == "readmit":
            return _readmit(client, path, args)
        if args.verb == "check":
            return _check(client, path, args)
        items, more = client.pages(f"{path}/checks", {}, args.limit)
        print_list(args, _CHECKS, items, more)
        return 0


def _forget(client: Client, args: argparse.Namespace) -> int:
    if not args.nodes and args.unheard_for is None and not args.introduced_by:
        raise ConfigurationError("nodes forget: say which: NODE..., --unheard-for TIME or --introduced-by TOKEN-ID")
    body: dict[str, Any] = {
        "nodes": args.nodes,
        "introduced_by": args.introduced_by,
        "force": args.force,
        "dry_run": args.dry_run,
        "reason": args.reason,
    }
    if args.unheard_for is not None:
        now_s = time.time()
        body["unheard_for_s"] = now_s - moment("--unheard-for", args.unheard_for, now_s)
        if body["unheard_for_s"] <= 0:
            raise ConfigurationError(f"--unheard-for: expected a time before now, got {args.unheard_for!r}")
    reported = client.call("POST", "/api/v1/nodes/forget", body=body)
    named = [kept for kept in reported["kept"] if kept["node"] in args.nodes]
    if args.json:
        print_json(reported)
        return 1 if named else 0
    verb = "would be forgotten" if args.dry_run else "forgotten"
    shown = [printable(node) for node in reported["forgotten"][:LIST_MAX]]
    sys.stdout.write("".join(f"{node} {verb}\n" for node in shown))
    if len(reported["forgotten"]) > len(shown):
        sys.stdout.write(f"and {len(reported['forgotten']) - len(shown)} more\n")
    for kept in reported["kept"][:LIST_MAX]:
        remedy = "" if kept["reason"] == "not_found" else "; --force forgets it all the same"
        sys.stderr.write(f"{printable(kept['node'])} is kept: {printable(kept['detail'])}{remedy}\n")
    sys.stderr.write(f"{len(reported['forgotten'])} nodes {verb}, {len(reported['kept'])} kept\n")
    return 1 if named else 0


def _readmit(client: Client, path: str, args: argparse.Namespace) -> int:
    flags = {"check": args.check, "force": args.force}
    query = {"reason": args.reason or None, **{name: "true" for name, given in flags.items() if given}}
    node = client.call("POST", f"{path}/readmit", query)
    check_id = node.get("check_id")
    if check_id and not args.no_wait:
        record = _waited(client, check_id, args)
        node = client.call("GET", path)
        if node.get("state") != "in_service":
            remedy = "" if record["state"] == "sick" else "; --force readmits it all the same"
            raise CannotGoOn(f"{printable(args.id)} stays {node.get('state')}: its check is {_said(record)}{remedy}")
    if args.json:
        print_json(node)
    elif check_id and args.no_wait:
        sys.stdout.write(f"readmit {printable(args.id)}: returns once {printable(check_id)} has passed\n")
    else:
        sys.stdout.write(f"readmit {printable(args.id)}: in service; {printable(node.get('reason'))}\n")
    return 0


def _check(client: Client, path: str, args: argparse.Namespace) -> int:
    if args.seconds is not None and not args.sdc:
        raise ConfigurationError("--seconds: expected --sdc beside it")
    if args.seconds is not None and not 0 < args.seconds <= SDC_S_MAX:
        raise ConfigurationError(f"--seconds: expected more than 0 and at most {SDC_S_MAX:g}, got {args.seconds:g}")
    query = {"reason": args.reason or None}
    if args.sdc:
        query["sdc_seconds"] = f"{args.seconds or SDC_S:g}"
    record = client.call("POST", f"{path}/check", query)
    if args.no_wait:
        if args.json:
            print_json(record)
        else:
            sys.stdout.write(f"check {printable(args.id)}: asked, {printable(record['id'])}\n")
        return 0
    record = _waited(client, record["id"], args)
    if args.json:
        print_json(record)
    else:
        if record["outcomes"]:
            print_table(_OUTCOMES, [{**each, "duration_s": f"{each['duration_s']:.1f}"} for each in record["outcomes"]])
        sys.stdout.write(f"{printable(args.id)} is {_said(record)}\n")
    return EXIT_CODES.get(record["state"], 1)


def _waited(client: Client, check_id: str, args: argparse.Namespace) -> Any:
    """Return the check once it is over. Raises ClientError on a timeout."""
    path = f"/api/v1/node-checks/{quote(check_id, safe='')}"
    record = client.call("GET", path)
    if not args.json and record["state"] in OPEN_STATES:
        sys.stderr.write(f"{printable(args.id)} is checked, for {record['deadline_seconds']:.0f} s at most\n")
    until_s = time.monotonic() + record["deadline_seconds"] + WAIT_BEYOND_S
    while record["state"] in OPEN_STATES:
        if time.monotonic() >= until_s:
            raise CannotGoOn(f"check {check_id} is {record['state']} for too long; eagle-eye nodes checks shows it")
        time.sleep(POLL_S)
        record = client.call("GET", path)
    return record


def _said(record: Any) -> str:
    words = {"cannot_tell": "undecided"}
    return f"{words.get(record['state'], record['state'])}: {printable(record['detail'])}"


NODES = NodeCommands(
    "nodes",
    "node",
    (
        Column("node", "node"),
        Column("state", "phase"),
        Column("accused of", "accused_of"),
        Column("job", "agent.job", 1),
        Column("cell", "cell", 2),
        Column("heard", "agent.heard"),
        Column("agent", "agent.version", 4),
        Column("introduced by", "introduced_by", 5),
        Column("incidents (30 days)", "memory.incidents_30_days", 2),
        Column("recurrence score", "memory.recurrence_score", 3),
        Column("reason", "reason", 1, below=True),
    ),
    filters={"state": get_args(NodeState), "cell": ANY},
    verbs=(
        Verb("exclude", "count it as out of service until it is readmitted", query=_REASON),
        Verb("drain", "count it as leaving once its job ends or restarts", query=_REASON),
    ),
    page=show.node,
)
