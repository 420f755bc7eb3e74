"""``eagle-eye replay``: sends a trace over the real wire protocol, one stream per node, with times shifted to now."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec

from eagle_eye.cli.client import CannotGoOn, connect
from eagle_eye.client.http_client import DEFAULT_SERVER
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.record_types import prepare_record_types

DONE, FAILED = 0, 1
SPEED_MAX = 1_000.0
SUFFIX_CHARS_MAX = 40
INCIDENTS_MAX = 1_000


def configure(parser: argparse.ArgumentParser) -> None:
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


def run(args: argparse.Namespace) -> int:
    """Send the trace; 1 when the server did not acknowledge all of it."""
    if not 1.0 <= args.speed <= SPEED_MAX:
        raise ConfigurationError(f"--speed: expected 1 to {SPEED_MAX:g}, got {args.speed:g}")
    if len(args.suffix) > SUFFIX_CHARS_MAX or not args.suffix.isprintable():
        raise ConfigurationError(f"--suffix: expected at most {SUFFIX_CHARS_MAX} printable characters")
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from eagle_eye.cli.replaying import Replay, figures
    from eagle_eye.server.backtest.trace import Trace
    from eagle_eye.server.backtest.trace_clocks import clock_lines
    from eagle_eye.simulator.load.target import target

    prepare_record_types()
    trace = Trace(args.trace)
    client = connect(args.server, args.token_file)
    server = target(client.server, args.ca_file)
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
    sys.stdout.write(msgspec.json.encode(said).decode() + "\n" if args.json else _summary(args.trace, said))
    return DONE if said["frames_lost"] == 0 else FAILED


def _summary(folder: Path, said: dict[str, Any]) -> str:
    sent = "{frames_acknowledged:,} of {frames_sent:,} frames acknowledged, {samples_acknowledged:,} samples"
    lines = [f"{folder}: job {said['job']}; {sent.format(**said)}"]
    if said["sends_late"]:
        lines.append(f"  {said['sends_late']:,} frames were sent late: this machine is too slow for that speed")
    if said["skipped"]:
        lines.append(f"  left out: rows of {len(said['skipped'])} nodes that trace.json does not name")
    for title, name in (("asked to wait", "asked_to_wait"), ("errors", "errors")):
        lines += [f"  {title}: {kind}, {count:,} times" for kind, count in said[name].items()]
    lines += [f"  {kind}: {detail}" for kind, detail in said["details"].items()]
    lines += [f"  the trace says   {label['fault']} on {_who(label['nodes'])}" for label in said["labels"]]
    lines += [
        f"  the server says  {item['fault']} on {_who(item['nodes'])}: {item['action']} ({item['state']}, {item['id']})"
        for item in said["incidents"]
    ] or ["  the server says  nothing yet"]
    return "\n".join(lines) + "\n"


def _who(nodes: list[str]) -> str:
    return (", ".join(nodes[:8]) + (", ..." if len(nodes) > 8 else "")) or "no node"
