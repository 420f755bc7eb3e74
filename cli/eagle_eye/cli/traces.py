"""``eagle-eye record|import|replay``: creates traces from a server or a Prometheus, sends one to a server."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from eagle_eye.cli.arguments import FunctionCommand, add_span, number, required_span, whole
from eagle_eye.cli.operator import CannotGoOn, connect
from eagle_eye.client import Client
from eagle_eye.client.http_client import DEFAULT_SERVER
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.record_types import prepare_record_types

if TYPE_CHECKING:
    from eagle_eye.server.backtest.prometheus_import import Imported


JOBS_SHOWN = 20


def configure_record(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("out", type=Path, metavar="OUT", help="the trace folder to write; must not exist")
    parser.add_argument("--job", required=True, help="the job to record")
    add_span(parser, since="", until="now")
    parser.add_argument("--server", metavar="URL", help=f"default {DEFAULT_SERVER}")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="file with a bearer token of scope read")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run_record(args: argparse.Namespace) -> int:
    """Write the trace; 1 when the server refuses or has no data of the job in that time."""
    now_s = time.time()
    start_s, end_s = required_span(args, now_s)
    client = connect(args.server, args.token_file)
    written = write_recording(client, args.out, args.job, start_s, end_s)
    if args.json:
        sys.stdout.write(msgspec.json.encode(written).decode() + "\n")
    else:
        sys.stdout.write(
            f"{args.out}: {written['seconds']:.0f} s of {written['nodes']} nodes, {written['rows']} rows,"
            f" {written['events']} events; eagle-eye backtest {args.out} judges it\n"
        )
    return 0


def write_recording(client: Client, out: Path, job: str, start_s: float, end_s: float) -> dict[str, Any]:
    """Write the trace and return statistics about it. Raises ClientError, BadTrace, BrokenStream."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    from eagle_eye.schema.frame import decode_frame
    from eagle_eye.schema.recording import messages
    from eagle_eye.server.backtest.recorder import Recorder, TraceWriter
    from eagle_eye.server.history.history import Opening
    from eagle_eye.server.model.clock import rfc3339

    prepare_record_types()
    progress = Progress(
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    path = f"/api/v1/jobs/{quote(job, safe='')}/recording"
    # Not RFC 3339: milliseconds would truncate the range's ends.
    query = {"start": repr(start_s), "end": repr(end_s)}
    with TraceWriter(out) as writer, progress, client.stream(path, query) as answer:
        task = progress.add_task("asking the server")
        parts = messages(answer.read)
        opening = msgspec.msgpack.decode(next(parts), type=Opening)
        recorder = Recorder(writer, opening)
        for low_s, high_s, problem in opening.gaps:
            lacking = f"{rfc3339(low_s)} to {rfc3339(high_s)}"
            sys.stderr.write(f"eagle-eye record: frames are lacking from {lacking}: {problem}\n")
        for raw in parts:
            recorder.add_frame(decode_frame(raw))
            if recorder.frames % 256 == 0:
                progress.update(task, description=f"{recorder.frames} frames of {recorder.nodes} nodes")
        if recorder.frames == 0:
            raise CannotGoOn(_nothing_recorded(client, job, opening.known))
        header = recorder.finish(start_s, end_s)
    return {
        "trace": str(out),
        "job": job,
        "start": header.start,
        "end": header.end,
        "seconds": header.end - header.start,
        "nodes": recorder.nodes,
        "frames": recorder.frames,
        "rows": recorder.rows,
        "events": recorder.events,
    }


def _nothing_recorded(client: Client, job: str, known: bool) -> str:
    if known:
        return f"the history has nothing of job {job!r} in that time; it may be older than history.retention_s"
    items, more = client.pages("/api/v1/jobs", {}, JOBS_SHOWN)
    names = ", ".join(repr(item["job"]) for item in items) + (", ..." if more else "")
    return f"no agent or scheduler ever spoke of job {job!r} in that time; the server knows {names or 'no job'}"


RECORD = FunctionCommand(configure_record, run_record)


ANSWER_BYTES_MAX = 256 << 20
SAMPLES_MAX = 200_000_000
TIMEOUT_S = 120.0


def configure_import(parser: argparse.ArgumentParser) -> None:
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


def run_import(args: argparse.Namespace) -> int:
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

    from eagle_eye.server.backtest.prometheus_import import ImportRequest, import_trace
    from eagle_eye.server.history.remote_history import Access, PromQl, http_client
    from eagle_eye.server.ingest.settings import RemoteWriteSettings
    from eagle_eye.server.model.identity import Clusters, Naming

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
        headers=_import_headers(args.header),
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


def _import_headers(given: list[str]) -> dict[str, str]:
    headers = {}
    for text in given:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise ConfigurationError("--header: expected NAME:VALUE, got something without a name or a colon")
        headers[name.strip()] = value.strip()
    return headers


IMPORT = FunctionCommand(configure_import, run_import)


DONE, FAILED = 0, 1
SPEED_MAX = 1_000.0
SUFFIX_CHARS_MAX = 40
INCIDENTS_MAX = 1_000


def configure_replay(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="the trace folder")
    parser.add_argument("--server", metavar="URL", help=f"default {DEFAULT_SERVER}")
    parser.add_argument("--speed", type=float, default=10.0, metavar="X", help="how much faster than it happened (10)")
    parser.add_argument("--suffix", default="", metavar="TEXT", help="put behind the names of job and nodes")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="a token of scope admin: it speaks for any node"
    )
    parser.add_argument("--ca-file", type=Path, metavar="FILE", help="who signed the server's certificate, PEM")
    parser.add_argument("--json", action="store_true", help="print figures, labels and incidents as JSON")


def run_replay(args: argparse.Namespace) -> int:
    """Send the trace; 1 when the server did not acknowledge all of it."""
    if not 1.0 <= args.speed <= SPEED_MAX:
        raise ConfigurationError(f"--speed: expected 1 to {SPEED_MAX:g}, got {args.speed:g}")
    if len(args.suffix) > SUFFIX_CHARS_MAX or not args.suffix.isprintable():
        raise ConfigurationError(f"--suffix: expected at most {SUFFIX_CHARS_MAX} printable characters")
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from eagle_eye.cli.replaying import Replay, figures
    from eagle_eye.server.backtest.trace import Trace, clock_lines
    from eagle_eye.simulator.load.connection import load_target

    prepare_record_types()
    trace = Trace(args.trace)
    client = connect(args.server, args.token_file)
    server = load_target(client.server, args.ca_file)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with progress:
        task = progress.add_task("reading the trace", total=1.0)

        def reported(share: float, tally: Any) -> None:
            progress.update(task, completed=share, description=f"{tally.acknowledged:,} frames acknowledged")

        replay = Replay(trace, server, client.token, client, args.suffix, reported)
        try:
            pace = asyncio.run(replay.run(args.speed))
        except OSError as error:
            raise CannotGoOn(f"{client.server} cannot be reached: {error or type(error).__name__}") from None
    found = client.pages("/api/v1/incidents", {"job": replay.job}, INCIDENTS_MAX)[0]
    for line in clock_lines(str(args.trace), trace.clock_offsets):
        sys.stderr.write(f"eagle-eye replay: {line}\n")
    said = figures(replay, pace, found)
    sys.stdout.write(msgspec.json.encode(said).decode() + "\n" if args.json else _replay_summary(args.trace, said))
    return DONE if said["frames_lost"] == 0 else FAILED


def _replay_summary(folder: Path, said: dict[str, Any]) -> str:
    sent = "{frames_acknowledged:,} of {frames_sent:,} frames acknowledged, {samples_acknowledged:,} samples"
    lines = [f"{folder}: job {said['job']}; {sent.format(**said)}"]
    if said["sends_late"]:
        lines.append(f"  {said['sends_late']:,} frames were sent late: this machine is too slow for that speed")
    if said["skipped"]:
        lines.append(f"  left out: rows of {len(said['skipped'])} nodes that trace.json does not name")
    for title, name in (("asked to wait", "asked_to_wait"), ("errors", "errors")):
        lines += [f"  {title}: {kind}, {count:,} times" for kind, count in said[name].items()]
    lines += [f"  {kind}: {detail}" for kind, detail in said["details"].items()]
    lines += [f"  the trace says   {label['fault']} on {_accused(label['nodes'])}" for label in said["labels"]]
    lines += [
        f"  the server says  {item['fault']} on {_accused(item['nodes'])}: {item['action']}"
        f" ({item['state']}, {item['id']})"
        for item in said["incidents"]
    ] or ["  the server says  nothing yet"]
    return "\n".join(lines) + "\n"


def _accused(nodes: list[str]) -> str:
    return (", ".join(nodes[:8]) + (", ..." if len(nodes) > 8 else "")) or "no node"


REPLAY = FunctionCommand(configure_replay, run_replay)
