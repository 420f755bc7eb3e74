"""``eagle-eye backtest``: runs the server's engine over recorded traces."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from eagle_eye.server.backtest.judging import BacktestTotals, JudgedTraces, judge_traces
from eagle_eye.server.backtest.run import VerdictLine
from eagle_eye.server.backtest.score import Scorecard

# Below this even no false exclusion bounds the rate only at more than one per node and day.
BOUND_NODE_DAYS_MIN = 3.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="a trace folder")
    parser.add_argument("--verdicts", type=Path, metavar="F.jsonl", help="write one JSON line for each verdict")
    parser.add_argument("--report", type=Path, metavar="F.json", help="write the score against the traces' labels")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the server's configuration file")
    parser.add_argument("--json", action="store_true", help="print the verdict lines and the report as JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="list each detector that could not tell")


def run(args: argparse.Namespace) -> int:
    """Run all traces; return 0 even if faults were found. Raises BadTrace, OSError, ConfigurationError."""
    report(args, judge(args))
    return 0


def judge(args: argparse.Namespace) -> JudgedTraces:
    """Run all traces, with progress on a terminal. Raises BadTrace, OSError, ConfigurationError."""
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("traces", total=1.0)
        return judge_traces(args.traces, args.config, lambda share: bar.update(task, completed=share))


def report(args: argparse.Namespace, judged: JudgedTraces) -> None:
    """Write the files that the flags name, and print the verdicts and the score. Raises OSError."""
    found, card, watched = judged
    if args.verdicts is not None:
        args.verdicts.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in found))
    if args.report is not None:
        args.report.write_text(json.dumps(judged.report(), indent=2) + "\n")
    for remark in watched.remarks():
        sys.stderr.write(f"eagle-eye backtest: {remark}\n")
    if args.json:
        for line in found:
            sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.write(json.dumps({"report": judged.report()}) + "\n")
    else:
        _print(found, card, watched, args.verbose)


def _print(found: Sequence[VerdictLine], card: Scorecard, watched: BacktestTotals, verbose: bool) -> None:
    console = Console(highlight=False)
    for line in found:
        since_s = line.time - watched.starts_s[line.trace]
        who = ", ".join(line.nodes) or "no single node"
        console.print(f"{Path(line.trace).name}  +{since_s:.1f} s  {line.fault}: {who} → {line.action}", markup=False)
        console.print(f"    {line.summary} (confidence {line.confidence:.2f})", markup=False, style="dim")
    if not found:
        console.print("no verdicts")
    if verbose:
        for detector, ratio in watched.ratios().items():
            console.print(f"{detector} could not tell in {ratio:.0%} of {watched.judgements} judgements")
    elif watched.blind:
        console.print(blind_line(watched))
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
            f" ({upper_bound(report['node_days'], report['false_exclusions_per_1000_node_days_upper_95'])})"
        )


def blind_line(watched: BacktestTotals) -> str:
    """Return the line that stands for the list: no verdict of a detector that could not tell is not health."""
    never = sum(count == watched.judgements for count in watched.blind.values())
    return f"could not tell: {len(watched.blind)} detectors at times, {never} of them always (-v lists them)"


def upper_bound(node_days: float, upper: float) -> str:
    """Return the bound on false exclusions per 1,000 node-days in words, or that the traces are too short for one."""
    if node_days < BOUND_NODE_DAYS_MIN:
        return f"too short to bound their rate: that takes {BOUND_NODE_DAYS_MIN:g} node-days or more"
    return f"95% upper bound {upper:.1f} per 1,000"
