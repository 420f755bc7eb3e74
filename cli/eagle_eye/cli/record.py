"""``eagle-eye record``: a trace from a running server's history."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from eagle_eye.cli.client import DEFAULT_SERVER, Client, ServerSaidNo, connect
from eagle_eye.schema.configuration import ConfigurationError

_AGO = re.compile(r"-?(\d+(?:\.\d+)?)(s|m|h|d)")
_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
JOBS_SHOWN = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    accept_ages(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="the trace folder to write; must not exist")
    parser.add_argument("--job", required=True, help="the job to record")
    when = "RFC 3339, Unix seconds, or how long ago: -15m"
    parser.add_argument("--since", required=True, metavar="TIME", help=f"from when on: {when}")
    parser.add_argument("--until", default="now", metavar="TIME", help=f"until when (default now): {when}")
    parser.add_argument("--server", metavar="URL", help=f"default {DEFAULT_SERVER}")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="file with a bearer token of scope read")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def accept_ages(parser: argparse.ArgumentParser) -> None:
    """Have the parser take "-15m" for a time; otherwise argparse takes it for an option."""
    parser._negative_number_matcher = re.compile(rf"^-\d+$|^-\d*\.\d+$|^{_AGO.pattern}$")


def run(args: argparse.Namespace) -> int:
    """Write the trace; 1 when the server says no or has nothing of the job in that time."""
    now_s = time.time()
    start_s, end_s = moment("--since", args.since, now_s), moment("--until", args.until, now_s)
    if start_s >= end_s:
        raise ConfigurationError(f"--since: expected a time before --until, got {args.since!r} and {args.until!r}")
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


def moment(flag: str, text: str, now_s: float) -> float:
    """Return the Unix seconds of a flag's time. Raises ConfigurationError."""
    from eagle_eye.server.timestamps import unix_seconds

    if text == "now":
        return now_s
    ago = _AGO.fullmatch(text)
    if ago:
        return now_s - float(ago[1]) * _UNIT_S[ago[2]]
    try:
        return unix_seconds(text)
    except ValueError as error:
        raise ConfigurationError(
            f"{flag}: expected RFC 3339, Unix seconds or an age such as -15m, got {text!r} ({error})"
        ) from None


def record(client: Client, out: Path, job: str, start_s: float, end_s: float) -> dict[str, Any]:
    """Write the trace and return figures about it. Raises ServerSaidNo, BadTrace, BrokenStream."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    from eagle_eye.schema.frame import decode_frame
    from eagle_eye.server.backtest.recorder import Recorder
    from eagle_eye.server.backtest.writer import TraceWriter
    from eagle_eye.server.recording import Opening, messages

    progress = Progress(
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    path = f"/api/v1/jobs/{quote(job, safe='')}/recording"
    # Not RFC 3339: milliseconds would cut off the range's ends.
    query = {"start": repr(start_s), "end": repr(end_s)}
    with TraceWriter(out) as writer, progress, client.stream(path, query) as read:
        task = progress.add_task("asking the server")
        parts = messages(read)
        opening = msgspec.msgpack.decode(next(parts), type=Opening)
        recorder = Recorder(writer, opening)
        for raw in parts:
            recorder.take(decode_frame(raw))
            if recorder.frames % 256 == 0:
                progress.update(task, description=f"{recorder.frames} frames of {recorder.nodes} nodes")
        if recorder.frames == 0:
            raise ServerSaidNo(_nothing(client, job, opening.known))
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
