"""``eagle-eye backtest``: runs the server's engine over recorded traces."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from eagle_eye.server.backtest.run import BacktestTotals, JudgedTraces, Scorecard, VerdictLine, judge_traces

# The columns of the score, by their names in the report.
SCORE_COLUMNS = {
    "labelled": "labels",
    "hits": "hits",
    "other_name": "other name",
    "false": "false",
    "wrong_drains": "wrong drains",
    "wrong_notices": "wrong notices",
    "recall": "recall",
    "delay_p50_s": "delay p50 s",
    "delay_p95_s": "delay p95 s",
}
LABELS_HELP = """labels: faults.jsonl in the trace's folder, a JSON object a line, none for a healthy trace:
  {"start": 1769850000, "end": 1769850600, "nodes": ["gpu-0172"], "fault": "thermal_throttle", "expect": "exclude"}
expect is what should be done: exclude (the nodes, now), restart (the job), drain (the nodes, when the job ends or
restarts anyway), job (a notice about the job) or none. fault is a name of docs/reference/faults.md."""
# Below this even no false exclusion bounds the rate only at more than one per node and day.
BOUND_NODE_DAYS_MIN = 3.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = LABELS_HELP
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
        figures = (Column(heading, justify="right") for heading in SCORE_COLUMNS.values())
        scores = Table(Column("fault", no_wrap=True), *figures, box=SIMPLE_HEAD, padding=0, show_edge=False)
        for fault, tally in [*report["faults"].items(), ("all", report["overall"])]:
            scores.add_row(fault, *("-" if tally[key] is None else f"{tally[key]:.3g}" for key in SCORE_COLUMNS))
        console.print(scores)
        console.print(score_line(report))


def score_line(report: Mapping[str, Any]) -> str:
    """Return the score in one sentence: what was done wrongly, what was said wrongly, and what was called otherwise."""
    overall = report["overall"]
    bound = upper_bound(report["node_days"], report["false_exclusions_per_1000_node_days_upper_95"])
    parts = [
        f"false exclusions: {report['false_exclusions']} in {report['node_days']:.3f} node-days ({bound})",
        f"false restarts: {overall['false'] - report['false_exclusions']}",
        f"wrong drains: {overall['wrong_drains']}",
        f"wrong notices: {overall['wrong_notices']}",
    ]
    if overall["other_names"]:
        names = ", ".join(f"{count} {fault}" for fault, count in overall["other_names"].items())
        parts.append(f"hits under another fault's name: {names}")
    return "; ".join(parts)


def blind_line(watched: BacktestTotals) -> str:
    """Return the line that stands for the list: no verdict of a detector that could not tell is not health."""
    never = sum(count == watched.judgements for count in watched.blind.values())
    return f"could not tell: {len(watched.blind)} detectors at times, {never} of them always (-v lists them)"


def upper_bound(node_days: float, upper: float) -> str:
    """Return the bound on false exclusions per 1,000 node-days in words, or that the traces are too short for one."""
    if node_days < BOUND_NODE_DAYS_MIN:
        return f"too short to bound their rate: that takes {BOUND_NODE_DAYS_MIN:g} node-days or more"
    return f"95% upper bound {upper:.1f} per 1,000"
