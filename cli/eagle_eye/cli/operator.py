"""The operator's view and verbs: ``eagle-eye jobs|incidents|actions|deliveries|audit|cells|sessions``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args
from urllib.parse import quote

import msgspec

from eagle_eye.cli import reports, show
from eagle_eye.cli.arguments import FunctionCommand, add_span, span, whole
from eagle_eye.cli.reports import needs_extra, redacted, write_file
from eagle_eye.cli.tables import Column, print_table, printable
from eagle_eye.client import Client, ClientError
from eagle_eye.client.http_client import DEFAULT_SERVER
from eagle_eye.schema.action import EVENT_TYPES, ActionKind, ReportState
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.api.filter_values import FAULT_NAMES, ListedIncidentState, ListedJobState
from eagle_eye.server.model.records import ActionState, DeliveryState


class CannotGoOn(ClientError):
    """What a command was asked for cannot be done; the message is for people."""


class CommandClient(Client):
    """A client whose errors name flags, and that tells of a standby on standard error."""

    URL = "--server"
    TOKEN_FILE = "--token-file"  # noqa: S105 - the flag's name
    LIMIT = "--limit"

    def say_standby(self, why: str) -> None:
        """Tell it on standard error, so that it is in no list and no JSON."""
        sys.stderr.write(f"{self.standby_words(printable(why))}\n")

    def say_cells(self, silent: str) -> None:
        """Tell it on standard error, so that it is in no list and no JSON."""
        sys.stderr.write(f"{self.cells_words(printable(silent))}\n")


def connect(server: str | None, token_file: Path | None) -> Client:
    """Return the client for a command's flags; defaults are in EAGLE_EYE_SERVER and EAGLE_EYE_TOKEN_FILE."""
    return CommandClient(server, token_file)


LIST_MAX = 100
LIMIT_MAX = 1_000_000
ANY: tuple[str, ...] = ()  # of a filter that takes any name


class Verb(NamedTuple):
    """An operation on one record: ``query`` and ``body`` name the flags that go into each."""

    name: str
    help: str
    method: str = "POST"
    query: tuple[str, ...] = ()
    body: tuple[str, ...] = ()


@dataclass(frozen=True)
class Noun:
    """One list of the API with its columns, verbs and filters, each filter with its values, or ANY."""

    name: str
    singular: str
    columns: tuple[Column, ...]
    filters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    verbs: tuple[Verb, ...] = ()
    page: Callable[[Client, str], None] | None = None  # prints one record for a person; None: it is printed as JSON

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the noun's verbs and flags; without a verb it lists."""
        common = argparse.ArgumentParser(add_help=False)
        # Flags are accepted before and after the verb; SUPPRESS keeps the second parser from resetting the first.
        add_common(common, argparse.SUPPRESS)
        add_common(parser, None)
        self._add_filters(parser, None, LIST_MAX)
        verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=False)
        listing = verbs.add_parser("list", parents=[common], help=f"list {self.name}, newest first (default)")
        self._add_filters(listing, argparse.SUPPRESS, argparse.SUPPRESS)
        one = verbs.add_parser(
            "show", parents=[common], help=f"one {self.singular} on a page; --json: all that is known of it"
        )
        one.add_argument("id", metavar=self.singular.upper(), help="its id or name, as listed")
        for verb in self.verbs:
            one = verbs.add_parser(verb.name, parents=[common], help=verb.help)
            one.add_argument("id", metavar=self.singular.upper(), help="its id or name, as listed")
            if "state" in verb.body:
                states = get_args(ReportState)
                one.add_argument("state", choices=states, metavar="STATE", help=f"how far: {', '.join(states)}")
            for flag in (name for name in (*verb.query, *verb.body) if name != "state"):
                one.add_argument(f"--{flag}", default="", help=f"{flag} to keep with it")
        self._add_verbs(verbs, common)

    def _add_verbs(self, verbs: Any, common: argparse.ArgumentParser) -> None:
        """Add verbs that are more than one request and its answer; none here."""

    def _add_filters(self, parser: argparse.ArgumentParser, default: Any, limit: Any) -> None:
        add_limit(parser, limit)
        for name, values in self.filters.items():
            add_filter(parser, name, values, default)

    def run(self, args: argparse.Namespace) -> int:
        """Ask the server and print its answer. Raises ClientError."""
        client = connect(args.server, args.token_file)
        path = f"/api/v1/{self.name}"
        if args.verb in (None, "list"):
            query = {name: getattr(args, name) for name in self.filters}
            items, more = self._listed(client, query, args.limit)
            print_list(args, self.columns, items if args.json else show.labelled(client, items), more)
            return 0
        if args.verb == "show" and self.page is not None and not args.json:
            self.page(client, args.id)
            return 0
        if args.verb == "show":
            answer = client.call("GET", f"{path}/{quote(args.id, safe='')}")
        else:
            answer = self._do(client.call, path, args)
        if args.json or args.verb == "show":
            print_json(answer)
        else:
            sys.stdout.write(f"{args.verb} {printable(args.id)}: done\n")
        return 0

    def _listed(self, client: Client, query: Mapping[str, Any], limit: int) -> tuple[list[Any], bool]:
        """Return at most ``limit`` records, and whether there are more. Raises ClientError."""
        return client.pages(f"/api/v1/{self.name}", query, limit)

    def _do(self, call: Any, path: str, args: argparse.Namespace) -> Any:
        verb = next(known for known in self.verbs if known.name == args.verb)
        one = f"{path}/{quote(args.id, safe='')}"
        target = one if verb.method == "DELETE" else f"{one}/{'reports' if verb.name == 'report' else verb.name}"
        query = {name: getattr(args, name) for name in verb.query if getattr(args, name)}
        body = {name: getattr(args, name) for name in verb.body} or None
        return call(verb.method, target, query, body)


def add_common(parser: argparse.ArgumentParser, default: Any) -> None:
    """Add the flags common to all these commands; ``default`` None, or SUPPRESS in a second parser."""
    parser.add_argument("--server", metavar="URL", default=default, help=f"default {DEFAULT_SERVER}")
    parser.add_argument("--token-file", type=Path, metavar="FILE", default=default, help="file with a bearer token")
    parser.add_argument("--json", action="store_true", default=default or False, help="print JSON")


def add_limit(parser: argparse.ArgumentParser, default: Any = LIST_MAX, most: int = LIMIT_MAX) -> None:
    """Add ``--limit``."""
    text = f"how many at most (default {LIST_MAX})"
    parser.add_argument("--limit", type=whole(1, most), metavar="N", default=default, help=text)


def add_filter(parser: argparse.ArgumentParser, name: str, values: Sequence[str] = ANY, default: Any = None) -> None:
    """Add a filter; with ``values`` it accepts only those."""
    where = "docs/reference/faults.md has them" if name == "fault" else ", ".join(values)
    parser.add_argument(
        f"--{name}",
        default=default,
        choices=values or None,
        metavar=name.upper(),
        help=f"only those of this {name}" + (f": {where}" if values else ""),
    )


def print_json(value: Any) -> None:
    """Write the value to standard output as indented JSON."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    sys.stdout.buffer.flush()


def print_list(args: argparse.Namespace, columns: Sequence[Column], items: Sequence[Any], more: bool) -> None:
    """Write a list as JSON or as a table, as the flags ask."""
    if args.json:
        print_json(items)
        return
    print_table(columns, items)
    say_more(args, more)


def say_more(args: argparse.Namespace, more: bool) -> None:
    """Say on standard error if the list was cut."""
    if more:
        sys.stderr.write(f"there are more than {args.limit}; --limit shows them\n")


JOBS = Noun(
    "jobs",
    "job",
    (
        Column("job", "job"),
        Column("attempt", "attempt"),
        Column("state", "state"),
        Column("cell", "cell", 2),
        Column("owner", "owner", 2),
        Column("step", "progress.step"),
        Column("progressed", "progress.progressed"),
        Column("source", "source", 5),
        Column("scheduled as", "scheduled_as", 3),
        Column("restarted by", "restart_owner", 4),
        Column("conflict", "conflict"),
    ),
    filters={"state": get_args(ListedJobState), "node": ANY, "cell": ANY},
    page=show.job,
)
ACTIONS = Noun(
    "actions",
    "action",
    (
        Column("action", "id"),
        Column("created", "created", 1),
        Column("kind", "kind"),
        Column("state", "state"),
        Column("job", "job"),
        Column("cell", "cell", 3),
        Column("exclude", "exclude"),
        Column("fault", "fault", 3),
        Column("expires", "expires", 4),
    ),
    filters={
        "state": get_args(ActionState),
        "job": ANY,
        "node": ANY,
        "kind": get_args(ActionKind),
        "incident": ANY,
        "cell": ANY,
    },
    verbs=(
        Verb("approve", "have it carried out"),
        Verb("reject", "decide against it"),
        Verb("withdraw", "take back an approval that nobody has taken up"),
        Verb("renew", "ask again for one that has expired; it awaits approval"),
        Verb("report", "say what became of it", body=("state", "detail")),
    ),
    page=show.action,
)
DELIVERIES = Noun(
    "deliveries",
    "delivery",
    (
        Column("delivery", "id"),
        Column("type", "type", 2),
        Column("state", "state"),
        Column("attempts", "attempts", 4),
        Column("status", "last_status", 5),
        Column("reason", "reason", 3),
        Column("error", "last_error", 1),
        Column("updated", "updated"),
    ),
    filters={"state": get_args(DeliveryState), "subscription": ANY, "event": ANY, "type": EVENT_TYPES},
    verbs=(Verb("redeliver", "deliver it again, now"),),
)


REPORT_FORMATS = ("html", "csv", "parquet")


class IncidentCommands(Noun):
    """Incidents, with a verb that makes more than one request: a report."""

    def _add_verbs(self, verbs: Any, common: argparse.ArgumentParser) -> None:
        report = verbs.add_parser("report", parents=[common], help="write a report on it, or the numbers of its charts")
        report.add_argument("id", metavar="INCIDENT", help="its id, as listed")
        report.add_argument("--html", type=Path, metavar="FILE", help="one file with everything in it, pictures too")
        report.add_argument("--csv", type=Path, metavar="FILE", help="the numbers behind the pictures")
        report.add_argument("--parquet", type=Path, metavar="FILE", help="the same, with types")
        report.add_argument("--redact", action="store_true", help="replace the names of nodes, jobs and people")

    def run(self, args: argparse.Namespace) -> int:
        """Ask the server and print its answer, or write the files. Raises ClientError, ConfigurationError, OSError."""
        return _report(args) if args.verb == "report" else super().run(args)


def _report(args: argparse.Namespace) -> int:
    files = {form: file for form in REPORT_FORMATS if (file := getattr(args, form)) is not None}
    if not files:
        raise ConfigurationError("report: expected --html FILE, --csv FILE or --parquet FILE")
    from rich.console import Console

    with Console(stderr=True).status("asking for the incident") as status:
        found = reports.gather_incident(
            connect(args.server, args.token_file), args.id, lambda what: status.update(f"asking for {what}")
        )
    if args.redact:
        found = redacted(found)
    for form, file in files.items():
        if form == "html":
            with needs_extra("--html"):
                from eagle_eye.cli import html_reports
            content = html_reports.incident_page(found, html_reports.origin(redacted=args.redact)).encode()
        else:
            content = reports.as_csv(found) if form == "csv" else reports.as_parquet(found)
        write_file(file, content)
    return 0


INCIDENTS = IncidentCommands(
    "incidents",
    "incident",
    show.INCIDENT_COLUMNS,
    filters={"state": get_args(ListedIncidentState), "job": ANY, "node": ANY, "fault": FAULT_NAMES, "cell": ANY},
    verbs=(
        Verb("acknowledge", "note that a person has seen it"),
        Verb("resolve", "close it"),
        Verb("false", "mark it as a false alarm"),
    ),
    page=show.incident,
)


AUDIT_COLUMNS = (
    Column("time", "time"),
    Column("who", "who"),
    Column("what", "verb"),
    Column("of", "subject"),
    Column("detail", "detail"),
)
AUDIT_FILTERS = ("subject", "who", "verb")


def configure_audit(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add_common(parser, None)
    add_limit(parser)
    parser.add_argument("--subject", metavar="ID", help="only what was done to this incident, action, node, token ...")
    parser.add_argument("--who", help="only what this token, local, server or configuration did")
    parser.add_argument("--verb", help="only this: open, confirm, act, approve, resolve, reload ...")
    add_span(parser, since="the beginning")


def run_audit(args: argparse.Namespace) -> int:
    """Print the entries, newest first. Raises ClientError, ConfigurationError."""
    since_s, _ = span(args)
    query = {**{name: getattr(args, name) for name in AUDIT_FILTERS}, "since": since_s}
    items, more = connect(args.server, args.token_file).pages("/api/v1/audit", query, args.limit)
    print_list(args, AUDIT_COLUMNS, items, more)
    return 0


AUDIT = FunctionCommand(configure_audit, run_audit)


CELLS_PATH = "/api/v1/cells"
CELL_COLUMNS = (
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


def configure_cells(parser: argparse.ArgumentParser) -> None:
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


def run_cells(args: argparse.Namespace) -> int:
    """Ask the server and print its answer. Raises ClientError."""
    client = connect(args.server, args.token_file)
    if args.verb in (None, "list"):
        print_list(args, CELL_COLUMNS, client.call("GET", CELLS_PATH)["items"], more=False)
        return 0
    cell = f"{CELLS_PATH}/{quote(args.cell, safe='')}"
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


CELLS = FunctionCommand(configure_cells, run_cells)


def configure_sessions(parser: argparse.ArgumentParser) -> None:
    """Add the command's verb and flags."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    end = verbs.add_parser("end", help="end all of a person's sessions; they can sign in again")
    end.add_argument("person", metavar="PERSON", help="the name with which they sign in, as in eagle-eye audit")
    add_common(end, None)


def run_sessions(args: argparse.Namespace) -> int:
    """End the sessions and say since when they are over. Raises ClientError."""
    body = {"person": args.person.removeprefix("user:")}
    ended = connect(args.server, args.token_file).call("POST", "/api/v1/sessions/end", body=body)
    if args.json:
        print_json(ended)
        return 0
    sys.stdout.write(f"sessions of {printable(ended['person'])} begun by {printable(ended['ended'])} are over\n")
    return 0


SESSIONS = FunctionCommand(configure_sessions, run_sessions)
