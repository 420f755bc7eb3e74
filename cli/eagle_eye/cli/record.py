"""``eagle-eye record``: creates a trace from a running server's history."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from eagle_eye.cli.client import CannotGoOn, connect
from eagle_eye.cli.times import add_span, required_span
from eagle_eye.client import Client
from eagle_eye.client.http_client import DEFAULT_SERVER
from eagle_eye.schema.record_types import prepare_record_types

JOBS_SHOWN = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("out", type=Path, metavar="OUT", help="the trace folder to write; must not exist")
    parser.add_argument("--job", required=True, help="the job to record")
    add_span(parser, since="", until="now")
    parser.add_argument("--server", metavar="URL", help=f"default {DEFAULT_SERVER}")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="file with a bearer token of scope read")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the trace; 1 when the server refuses or has no data of the job in that time."""
    now_s = time.time()
    start_s, end_s = required_span(args, now_s)
    client = connect(args.server, args.token_file)
    written = record(client, args.out, args.job, start_s, end_s)
    if args.json:
        sys.stdout.write(msgspec.json.encode(written).decode() + "\n")
    else:
        sys.stdout.write(
            f"{args.out}: {written['seconds']:.0f} s of {written['nodes']} nodes, {written['rows']} rows,"
            f" {written['events']} events; eagle-eye backtest {args.out} judges it\n"
        )
    return 0


def record(client: Client, out: Path, job: str, start_s: float, end_s: float) -> dict[str, Any]:
    """Write the trace and return statistics about it. Raises ClientError, BadTrace, BrokenStream."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    from eagle_eye.schema.frame import decode_frame
    from eagle_eye.schema.recording import messages
    from eagle_eye.server.backtest.recorder import Recorder
    from eagle_eye.server.backtest.writer import TraceWriter
    from eagle_eye.server.history.history import Opening
    from eagle_eye.server.model.timestamps import rfc3339

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
            recorder.take(decode_frame(raw))
            if recorder.frames % 256 == 0:
                progress.update(task, description=f"{recorder.frames} frames of {recorder.nodes} nodes")
        if recorder.frames == 0:
            raise CannotGoOn(_nothing(client, job, opening.known))
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


def _nothing(client: Client, job: str, known: bool) -> str:
    if known:
        return f"the history has nothing of job {job!r} in that time; it may be older than history.retention_s"
    items, more = client.pages("/api/v1/jobs", {}, JOBS_SHOWN)
    names = ", ".join(repr(item["job"]) for item in items) + (", ..." if more else "")
    return f"no agent or scheduler ever spoke of job {job!r} in that time; the server knows {names or 'no job'}"
