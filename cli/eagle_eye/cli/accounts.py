"""``eagle-eye goodput``, ``ledger`` and ``tickets``: time accounting, verdicts in hindsight, and repairs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_eye.cli.arguments import add_span, span
from eagle_eye.cli.operator import (
    LIST_MAX,
    CannotGoOn,
    add_common,
    add_filter,
    add_limit,
    connect,
    print_json,
    print_list,
    say_more,
)
from eagle_eye.cli.reports import HOUR_S, gather_accounts, hours, job_row, needs_extra, total_row, write_file
from eagle_eye.cli.tables import Column, print_table, printable
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.labels import state_label
from eagle_eye.server.api.filter_values import FAULT_NAMES
from eagle_eye.server.store.store import PAGE_LIMIT_MAX

FILE_BYTES_MAX = 3 << 20  # with JSON's escapes within what the server reads
CAUSES_SHOWN = 5  # per job
PARTS = ("down", "startup", "redone", "stopped", "slow", "ending")

_JOBS = (
    Column("job", "job"),
    Column("cell", "cell", 1),
    Column("attempts", "attempts"),
    Column("hours", "hours"),
    Column("ETTR", "ettr"),
    Column("goodput", "goodput"),
    Column("lost GPU-hours", "lost"),
    Column("unknown hours", "unknown"),
)
_CAUSES = (
    Column("job", "job"),
    Column("lost to", "part"),
    Column("because of", "fault"),
    Column("node", "node"),
    Column("GPU-hours", "gpu_hours"),
    Column("hours", "hours"),
)
_LEDGER = (
    Column("created", "created"),
    Column("state", "state", 1),
    Column("asked", "kind"),
    Column("fault", "fault"),
    Column("node", "node"),
    Column("job", "job", 2),
    Column("cell", "cell", 3),
    Column("standing", "standing"),
    Column("why", "detail"),
)
_TOTALS = (
    Column("of", "name"),
    Column("right", "right"),
    Column("wrong", "wrong"),
    Column("pending", "pending"),
    Column("cannot tell", "cannot_tell"),
    Column("precision", "precision"),
    Column("95%", "interval"),
)
_STEPS = (
    Column("fault", "fault"),
    Column("now", "mode"),
    Column("right", "right"),
    Column("wrong", "wrong"),
    Column("unknown", "unknown"),
    Column("precision", "precision"),
    Column("95%", "interval", 1),
    Column("saved GPU-hours", "saved", 2),
    Column("cost GPU-hours", "cost", 3),
    Column("next", "next"),
    Column("enough?", "detail"),
)
_TICKETS = (
    Column("ticket", "id"),
    Column("node", "node"),
    Column("opened", "opened"),
    Column("closed", "closed"),
    Column("text", "text"),
)


class Goodput:
    """``eagle-eye goodput``."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        add_common(parser, None)
        parser.add_argument("--by", choices=("job", "node", "fault"), default="job", help="what the sums are of")
        parser.add_argument("--job", help="only of this job")
        add_filter(parser, "cell")
        add_span(parser, since="7 days before", until="now")
        add_limit(parser, most=PAGE_LIMIT_MAX)

    def run(self, args: argparse.Namespace) -> int:
        """Ask the server and print its answer. Raises ClientError."""
        since_s, until_s = span(args)
        query = {"by": args.by, "job": args.job, "cell": args.cell, "since": since_s, "until": until_s}
        reported = connect(args.server, args.token_file).call("GET", "/api/v1/goodput", {**query, "limit": args.limit})
        if args.json:
            print_json(reported)
            return 0
        sys.stdout.write(f"{reported['since']} to {reported['until']}\n")
        if args.by == "job":
            print_table(_JOBS, [job_row(item) for item in reported["items"]])
            causes = [
                _loss_row(cause, item["job"]) for item in reported["items"] for cause in item["causes"][:CAUSES_SHOWN]
            ]
            if causes:
                sys.stdout.write("\n")
                print_table(_CAUSES, causes)
        else:
            parts = [Column(part, part) for part in PARTS if any(part in item["lost"] for item in reported["items"])]
            columns = (Column(args.by, "name"), Column("GPU-hours", "gpu_hours"), Column("hours", "hours"), *parts)
            print_table(columns, [_cause_row(item, args.by) for item in reported["items"]])
        _print_unknown(reported["total"])
        if reported["left_out"]:
            sys.stderr.write(f"{reported['left_out']} more; --limit shows them\n")
        if reported["cut"]:
            sys.stderr.write("there are more attempts on record than are read; the oldest ones are left out\n")
        return 0


class LedgerCommands:
    """``eagle-eye ledger``."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        add_common(parser, None)
        add_filter(parser, "job")
        add_filter(parser, "fault", FAULT_NAMES)
        add_filter(parser, "cell")
        parser.add_argument("--standing", choices=("right", "wrong", "pending", "cannot_tell"), help="only those")
        parser.add_argument(
            "--steps", action="store_true", help="is it enough to go from observe to approve, to act? and the lines"
        )
        add_span(parser, since="90 days ago")
        add_limit(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Ask the server and print its answer. Raises ClientError, ConfigurationError."""
        if args.steps and (args.job or args.standing or args.cell):
            raise ConfigurationError("--steps: expected no --job, --cell or --standing; it is of all jobs")
        client = connect(args.server, args.token_file)
        since_s, _ = span(args)
        if args.steps:
            steps = client.call("GET", "/api/v1/ledger/steps", {"fault": args.fault, "since": since_s})
            print_json(steps) if args.json else _print_steps(steps, lines_of_all=args.fault is not None)
            return 0
        query = {**{name: getattr(args, name) for name in ("job", "fault", "standing", "cell")}, "since": since_s}
        reported = client.call("GET", "/api/v1/ledger", {**query, "limit": 1})
        items, more = client.pages("/api/v1/ledger", query, args.limit)
        if args.json:
            print_json({**reported, "items": items, "next": None})
            return 0
        print_table(_LEDGER, items)
        totals = [("all", reported["total"]), *reported["by_fault"].items()]
        totals += [(f"detector {name}", counted) for name, counted in reported["by_detector"].items()]
        sys.stdout.write(
            f"\nsince {reported['since']}, looked at for {reported['window_seconds'] / HOUR_S:g} hours each:\n"
        )
        print_table(_TOTALS, [total_row(name, counted) for name, counted in totals])
        say_more(args, more)
        if reported["cut"]:
            sys.stderr.write("there are more on record than are read; the oldest ones are left out\n")
        return 0


class Tickets:
    """``eagle-eye tickets``."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the verbs and flags; without a verb it lists."""
        common = argparse.ArgumentParser(add_help=False)
        add_common(common, argparse.SUPPRESS)
        add_common(parser, None)
        parser.set_defaults(node=None, limit=LIST_MAX)
        verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=False)
        listing = verbs.add_parser("list", parents=[common], help="list them, the last imported first (default)")
        listing.add_argument("--node", help="only those of this node")
        add_limit(listing)
        bring = verbs.add_parser("import", parents=[common], help="take a file of tickets; known ids are replaced")
        bring.add_argument(
            "file", type=Path, metavar="FILE", help="FILE.csv or FILE.jsonl: id, node, opened, closed, text"
        )
        bring.add_argument("--format", choices=("csv", "jsonl"), help="where the file's name does not say it")

    def run(self, args: argparse.Namespace) -> int:
        """Do what the verb says. Raises ClientError."""
        client = connect(args.server, args.token_file)
        if args.verb == "import":
            reported = client.call("POST", "/api/v1/tickets", body={"format": _format(args), "text": _text(args.file)})
            if args.json:
                print_json(reported)
                return 0
            sys.stdout.write(
                f"{reported['new']} new, {reported['changed']} changed, {reported['unchanged']} known already\n"
            )
            if reported["left_out_columns"]:
                sys.stderr.write(f"columns left out: {printable(reported['left_out_columns'])}\n")
            if reported["unknown_nodes_count"]:
                names = printable(reported["unknown_nodes"])
                sys.stderr.write(f"{reported['unknown_nodes_count']} nodes were never heard of, such as {names}\n")
            return 0
        items, more = client.pages("/api/v1/tickets", {"node": args.node}, args.limit)
        print_list(args, _TICKETS, items, more)
        return 0


class AccountsCommands:
    """``eagle-eye accounts``."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the verb and its flags."""
        verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
        report = verbs.add_parser("report", help="write a report on lost time, for people who were not there")
        add_common(report, None)
        add_span(report, since="7 days before", until="now")
        add_filter(report, "cell")
        report.add_argument("--html", type=Path, metavar="FILE", help="one file with everything in it, pictures too")

    def run(self, args: argparse.Namespace) -> int:
        """Write the report, or print its numbers as JSON. Raises ClientError, ConfigurationError, OSError."""
        if args.html is None and not args.json:
            raise ConfigurationError("report: expected --html FILE, or --json")
        from rich.console import Console

        since_s, until_s = span(args)
        with Console(stderr=True).status("asking for the accounts") as status:
            found = gather_accounts(
                connect(args.server, args.token_file),
                since_s,
                until_s,
                args.cell,
                lambda what: status.update(f"asking for {what}"),
            )
        if args.json:
            print_json(found._asdict())
        if args.html is not None:
            with needs_extra("--html"):
                from eagle_eye.cli import html_reports
            write_file(args.html, html_reports.accounts_page(found, html_reports.origin()).encode())
        return 0


def _print_steps(steps: Mapping[str, Any], lines_of_all: bool) -> None:
    """Print what is on record of each fault; the lines of all, or of those that have proved themselves."""
    recorded = [item for item in steps["items"] if _decisions(item)]
    print_table(_STEPS, [_step_row(item) for item in recorded])
    unheard = [item["fault"] for item in steps["items"] if not _decisions(item)]
    if unheard:
        sys.stdout.write(f"\nno decision on record, so unknown: {printable(unheard)}\n")
    for item in steps["items"]:
        if item["toml"] and (lines_of_all or item["verdict"] == "suffices"):
            where = f", in place of {item['in_place_of']}" if item["in_place_of"] else ""
            sys.stdout.write(f"\n# {item['fault']}: from {item['mode']} to {item['next']}{where}\n{item['toml']}\n")
    sys.stdout.write(f"\nsince {steps['since']}; each incident counts once\n")
    if steps["cut"]:
        sys.stderr.write("there are more on record than are read; the oldest ones are left out\n")


def _decisions(item: Mapping[str, Any]) -> int:
    return int(item["right"] + item["wrong"] + item["pending"] + item["cannot_tell"])


def _step_row(item: Mapping[str, Any]) -> dict[str, Any]:
    unknown = item["pending"] + item["cannot_tell"]
    amounts = {name: _at_stake(item[name]) for name in ("saved", "cost")}
    of_jobs = [f"{one['mode']} for {', '.join(one['jobs'])}" for one in item["elsewhere"]]
    return {
        **item,
        **total_row(item["fault"], item),
        "mode": "; ".join([item["mode"], *of_jobs]),
        "right": f"{item['right']} ({item['approved']} by approval)" if item["approved"] else item["right"],
        "unknown": unknown,
        **amounts,
        "detail": f"{state_label(item['verdict'])}: {item['detail']}",
    }


def _at_stake(amount: Mapping[str, Any]) -> str:
    if amount["gpu_seconds"] is None:
        return "cannot tell" if amount["cannot_tell"] else ""
    return f"{hours(amount['gpu_seconds'])}{' or more' if amount['cannot_tell'] else ''}"


def _format(args: argparse.Namespace) -> str:
    form = args.format or {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}.get(args.file.suffix.lower())
    if form is None:
        raise CannotGoOn(f"{args.file}: neither .csv nor .jsonl; say --format csv or --format jsonl")
    return str(form)


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise CannotGoOn(f"{file} cannot be read: {error.strerror or error}") from None
    if len(content) > FILE_BYTES_MAX:
        raise CannotGoOn(f"{file} has more than {FILE_BYTES_MAX >> 20} MiB; import it in parts")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise CannotGoOn(f"{file}, line {line}: not UTF-8; save it as UTF-8") from None


def _loss_row(cause: Mapping[str, Any], job: str) -> dict[str, Any]:
    return {
        **cause,
        "job": job,
        "gpu_hours": "cannot tell" if cause["seconds_without_gpu_count"] else hours(cause["gpu_seconds"]),
        "hours": hours(cause["seconds"]),
    }


def _cause_row(item: Mapping[str, Any], by: str) -> dict[str, Any]:
    return {
        "name": item[by] or "(no single node)",
        "gpu_hours": hours(item["gpu_seconds"]),
        "hours": hours(item["seconds"]),
        **{part: hours(amount["gpu_seconds"]) for part, amount in item["lost"].items()},
    }


def _print_unknown(total: Mapping[str, Any]) -> None:
    for amount in total["unknown"]:
        sys.stdout.write(f"not known for {hours(amount['seconds'])} hours: {printable(amount['reason'])}\n")


GOODPUT, LEDGER, TICKETS, ACCOUNTS = Goodput(), LedgerCommands(), Tickets(), AccountsCommands()
