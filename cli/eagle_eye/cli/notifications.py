"""``eagle-eye subscriptions`` and ``silences``: who is told of what, and what is not told for a time."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args
from urllib.parse import quote

from eagle_eye.cli.arguments import add_span, length, number, span
from eagle_eye.cli.operator import ANY, CannotGoOn, Noun, Verb, connect, print_json
from eagle_eye.cli.tables import Column, printable
from eagle_eye.schema.action import EVENT_TYPES
from eagle_eye.schema.configuration import private_file
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


FORMATS = ("cloudevents", "alertmanager", "alertmanager_api")
_FILTERS = ("types", "jobs", "faults", "matchers")
_OWN = ("add", "change", "pause", "resume", "rotate", "redeliver")


class Subscriptions(Noun):
    """Subscriptions, whose verbs say more than a name."""

    def _add_verbs(self, verbs: Any, common: argparse.ArgumentParser) -> None:
        add = verbs.add_parser("add", parents=[common], help="make one; its secret is shown this once")
        add.add_argument("url", metavar="URL", help="where events go")
        add.add_argument("--format", choices=FORMATS, default=FORMATS[0], help=f"default {FORMATS[0]}")
        change = self._verb(verbs, common, "change", "change where events go, or which; other filters stay")
        change.add_argument("--url", help="where they go from now on")
        change.add_argument("--any", action="append", default=[], choices=_FILTERS, help="have no such filter")
        for parser in (add, change):
            parser.add_argument(
                "--type",
                action="append",
                dest="types",
                metavar="TYPE",
                choices=EVENT_TYPES,
                help=f"only events of this type: {', '.join(EVENT_TYPES)}",
            )
            parser.add_argument("--job", action="append", dest="jobs", help="only events of this job, or a glob")
            parser.add_argument("--fault", action="append", dest="faults", help="only of this fault, or a glob")
            parser.add_argument(
                "--match", action="append", dest="matchers", metavar="LABEL=GLOB", help="severity=critical, node!=lab-*"
            )
        self._verb(verbs, common, "pause", "deliver nothing until it is resumed; what waits fails")
        self._verb(verbs, common, "resume", "have one go on that was paused, or ended by its target")
        rotate = self._verb(verbs, common, "rotate", "make a new secret; the old one signs too for a time")
        rotate.add_argument(
            "--overlap", type=number(0.0, 1e9), metavar="SECONDS", help="how long the old one signs; 0 if it has leaked"
        )
        for parser in (add, rotate):
            parser.add_argument("--secret-file", type=Path, metavar="FILE", help="take the secret in it (whsec_...)")
            parser.add_argument(
                "--out", type=Path, metavar="FILE", help="write the secret to a new file, not the screen"
            )
        again = self._verb(verbs, common, "redeliver", "deliver again what failed")
        add_span(again, since="")

    def _verb(self, verbs: Any, common: argparse.ArgumentParser, name: str, text: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = verbs.add_parser(name, parents=[common], help=text)
        parser.add_argument("id", metavar="SUBSCRIPTION", help="its id, as listed")
        return parser

    def run(self, args: argparse.Namespace) -> int:
        """Ask the server and print its answer. Raises ClientError."""
        if args.verb not in _OWN:
            return super().run(args)
        call = connect(args.server, args.token_file).call
        path = "/api/v1/subscriptions"
        if args.verb == "add":
            body = {"url": args.url, "format": args.format, **_filters(args), **_secret(args)}
            return _made(args.out, lambda: call("POST", path, body=body))
        path = f"{path}/{quote(args.id, safe='')}"
        if args.verb == "rotate":
            overlap = {} if args.overlap is None else {"overlap_seconds": args.overlap}
            body = {**overlap, **_secret(args)}
            return _made(args.out, lambda: call("POST", f"{path}/rotate", body=body))
        if args.verb == "redeliver":
            return _redeliver(call, f"{path}/redeliver", args)
        answer = call("PATCH", path, body=_change(args))
        if args.json or args.verb == "change":
            print_json(answer)
        else:
            sys.stdout.write(f"{args.verb} {printable(args.id)}: done\n")
        return 0


def _made(out: Path | None, ask: Callable[[], Any]) -> int:
    """Print the created subscription, and its secret unless it goes to a file."""
    if out is None:
        print_json(ask())
        return 0
    with private_file(out, "--out") as file:
        reported = ask()
        file.write(reported.pop("secret") + "\n")
    print_json(reported)
    return 0


def _change(args: argparse.Namespace) -> dict[str, Any]:
    if args.verb != "change":
        return {"active": args.verb == "resume"}
    url = {} if args.url is None else {"url": args.url}
    body = {**url, **{name: [] for name in args.any}, **_filters(args)}
    if not body:
        raise CannotGoOn("nothing to change; give --url, a filter, or --any")
    return body


def _filters(args: argparse.Namespace) -> dict[str, list[str]]:
    return {name: given for name in _FILTERS if (given := getattr(args, name)) is not None}


def _secret(args: argparse.Namespace) -> dict[str, str]:
    if args.secret_file is None:
        return {}
    try:
        return {"secret": args.secret_file.read_text(encoding="ascii").strip()}
    except (OSError, UnicodeDecodeError) as error:
        raise CannotGoOn(f"--secret-file: {args.secret_file} cannot be read: {type(error).__name__}") from None


def _redeliver(call: Any, path: str, args: argparse.Namespace) -> int:
    since_s, _ = span(args)
    answer = call("POST", path, body={"since": repr(since_s)})
    if args.json:
        print_json(answer)
    else:
        sys.stdout.write(f"redeliver {printable(args.id)}: {answer['redelivered']} are delivered again\n")
    if answer["more"]:
        sys.stderr.write("there are more; say it again once these have gone\n")
    return 0


SUBSCRIPTIONS = Subscriptions(
    "subscriptions",
    "subscription",
    (
        Column("subscription", "id"),
        Column("url", "url"),
        Column("format", "format", 4),
        Column("active", "active"),
        Column("waiting", "health.pending", 3),
        Column("delivered", "health.delivered", 5),
        Column("failing since", "health.failing_since"),
        Column("error", "health.last_error", 2),
        Column("ended", "ended_reason", 1),
    ),
    verbs=(
        Verb("delete", "end it for good", method="DELETE"),
        Verb("ping", "send it a ping; deliveries --subscription says what became of it"),
    ),
)
