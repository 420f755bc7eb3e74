"""``eagle-eye backtest``: the server's engine over recorded traces."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from eagle_eye.schema import configuration
from eagle_eye.server.backtest.run import Backtest, VerdictLine
from eagle_eye.server.backtest.score import Scorecard
from eagle_eye.server.backtest.trace import BadTrace, Trace
from eagle_eye.server.config import ServerConfig


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="a trace folder")
    parser.add_argument("--verdicts", type=Path, metavar="F.jsonl", help="write one JSON line for each verdict")
    parser.add_argument("--report", type=Path, metavar="F.json", help="write the score against the traces' labels")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the server's configuration file")
    parser.add_argument("--json", action="store_true", help="print the verdict lines and the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Run all traces; 0 also when faults were found, 1 for an unusable trace, 2 for a wrong configuration."""
    try:
        config = configuration.load(ServerConfig, args.config, os.environ, {})
    except configuration.ConfigurationError as error:
        sys.stderr.write(f"eagle-eye backtest: {error}\n")
        return 2
    card = Scorecard()
    found: list[VerdictLine] = []
    try:
        with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
            for folder in bar.track(args.traces, description="traces"):
                found += _run_one(folder, config, card)
        if args.verdicts is not None:
            args.verdicts.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in found))
        if args.report is not None:
            args.report.write_text(json.dumps(card.report(), indent=2) + "\n", encoding="utf-8")
    except (BadTrace, OSError) as error:
        sys.stderr.write(f"eagle-eye backtest: {error}\n")
        return 1
    if args.json:
        for line in found:
            sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.write(json.dumps({"report": card.report()}) + "\n")
    else:
        _print(found, card)
    return 0


def _run_one(folder: Path, config: ServerConfig, card: Scorecard) -> list[VerdictLine]:
    trace = Trace(folder)
    lines = list(Backtest(trace, config.detection, config.policy).run())
    labels = trace.labels()
    if labels is not None:
        header = trace.header
        card.add(labels, lines, len(header.nodes), header.end - header.start)
    return lines


def _print(found: list[VerdictLine], card: Scorecard) -> None:
    console = Console()
    table = Table("trace", "time", "fault", "nodes", "action", "confidence", "summary")
    for line in found:
        row = (Path(line.trace).name, f"{line.time:.1f}", line.fault, ", ".join(line.nodes), line.action)
        table.add_row(*row, f"{line.confidence:.2f}", line.summary)
    console.print(table if found else "no verdicts")
    report = card.report()
    if report["node_days"]:
        scores = Table("fault", "labelled", "hits", "false", "recall", "delay p50 s", "delay p95 s")
        for fault, tally in [*report["faults"].items(), ("all", report["overall"])]:
            figures = (tally["labelled"], tally["hits"], tally["false"], tally["recall"])
            delays = (tally["delay_p50_s"], tally["delay_p95_s"])
            scores.add_row(fault, *("-" if f is None else f"{f:g}" for f in (*figures, *delays)))
        console.print(scores)
        console.print(
            f"false exclusions: {report['false_exclusions']} in {report['node_days']:.3f} node-days"
            f" (95% upper bound {report['false_exclusions_per_1000_node_days_upper_95']:.1f} per 1,000)"
        )
