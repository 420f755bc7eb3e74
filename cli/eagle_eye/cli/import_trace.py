"""``eagle-eye import``: creates a trace from an existing Prometheus that has metrics of the nodes."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from eagle_eye.cli.arguments import number, whole
from eagle_eye.cli.times import add_span, required_span
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.record_types import prepare_record_types

if TYPE_CHECKING:
    from eagle_eye.server.trace_import.importing import Imported

ANSWER_BYTES_MAX = 256 << 20
SAMPLES_MAX = 200_000_000
TIMEOUT_S = 120.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("out", type=Path, metavar="OUT", help="the trace folder to write; must not exist")
    parser.add_argument("--prometheus", required=True, metavar="URL", help="what stands before /api/v1/query")
    parser.add_argument("--job", required=True, help="the job that the trace is of")
    add_span(parser, since="", until="now")
    parser.add_argument(
        "--nodes", action="append", default=[], metavar="GLOB", help="the job's nodes, where no label names the job"
    )
    parser.add_argument(
        "--selector", default="", metavar="MATCHERS", help='only series that match, such as cluster="a",env="prod"'
    )
    parser.add_argument(
        "--node-label", action="append", default=[], metavar="LABEL", help="a label that names the node, before others"
    )
    parser.add_argument(
        "--job-label", action="append", default=[], metavar="LABEL", help="a label that names the job, before others"
    )
    parser.add_argument(
        "--step", type=number(0.1, 3_600.0), metavar="SECONDS", help="one sample in so many seconds (default all)"
    )
    parser.add_argument(
        "--samples-max", type=whole(1, 1 << 40), default=SAMPLES_MAX, metavar="N", help=f"default {SAMPLES_MAX}"
    )
    parser.add_argument("--token-file", default="", metavar="FILE", help="file with a bearer token for the Prometheus")
    parser.add_argument("--user", default="", metavar="NAME", help="for basic authentication")
    parser.add_argument("--password-file", default="", metavar="FILE", help="file with its password")
    parser.add_argument(
        "--header", action="append", default=[], metavar="NAME:VALUE", help="sent with each request: X-Scope-OrgID:a"
    )
    parser.add_argument("--ca-file", default="", metavar="FILE", help="certificates to trust in place of the system's")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the trace; 1 when the Prometheus refuses or has no data of the job in that time."""
    now_s = time.time()
    start_s, end_s = required_span(args, now_s)
    if not args.prometheus.startswith(("http://", "https://")):
        raise ConfigurationError(f"--prometheus: expected an http:// or https:// URL, got {args.prometheus!r}")
    imported = _import(args, start_s, end_s)
    if args.json:
        sys.stdout.write(msgspec.json.encode(imported).decode() + "\n")
        return 0
    left_out = sum(imported.left_out.values())
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(imported.left_out.items()))
    sys.stdout.write(
        f"{args.out}: {imported.seconds:.0f} s of {imported.nodes} nodes, {imported.samples} samples, {imported.rows}"
        f" rows, {imported.events} events" + (f"; {left_out} samples left out ({reasons})" if left_out else "") + "\n"
        f"eagle-eye backtest {args.out} judges it\n"
    )
    return 0


def _import(args: argparse.Namespace, start_s: float, end_s: float) -> Imported:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from eagle_eye.server.history.remote_history import Access, PromQl, http_client
    from eagle_eye.server.ingest.settings import RemoteWriteSettings
    from eagle_eye.server.model.identity import Clusters, Naming
    from eagle_eye.server.trace_import.catalogued import ImportRequest
    from eagle_eye.server.trace_import.importing import import_trace

    prepare_record_types()
    known = RemoteWriteSettings()
    wanted = ImportRequest(
        job=args.job,
        nodes=tuple(args.nodes),
        matchers=args.selector.strip().removeprefix("{").removesuffix("}"),
        naming=Naming(tuple(dict.fromkeys((*args.node_label, *known.node_labels))), known.cluster_labels, Clusters()),
        job_labels=tuple(dict.fromkeys((*args.job_label, *known.job_labels))),
    )
    access = Access(
        headers=_headers(args.header),
        bearer_token_file=args.token_file,
        basic_auth_user=args.user,
        basic_auth_password_file=args.password_file,
        ca_file=args.ca_file,
    )
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with http_client(access, TIMEOUT_S) as http, progress:
        task = progress.add_task("asking the Prometheus", total=1.0)

        def reported(what: str, done: float) -> None:
            progress.update(task, description=what, completed=done)

        promql = PromQl(http, args.prometheus, ANSWER_BYTES_MAX)
        return import_trace(promql, args.out, wanted, start_s, end_s, args.step, args.samples_max, reported)


def _headers(given: list[str]) -> dict[str, str]:
    headers = {}
    for text in given:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise ConfigurationError("--header: expected NAME:VALUE, got something without a name or a colon")
        headers[name.strip()] = value.strip()
    return headers
