"""The suite's figures for docs/explanation/detection.md: ``python -m benchmarks.detection.report RESULTS.json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def markdown(results: Mapping[str, Any]) -> str:
    """Return all tables, a section for each profile."""
    plan = results["plan"]
    seeds = results["seeds"]
    summary = (
        f"Judged: {results['judged']} of {results['planned']} traces and profiles; {plan['faults']} faults,"
        f" {plan['node_days']:g} node-days without a fault. Physics: {plan.get('physics', 'own')}."
        f" Seeds: reported {seeds.get('report', '-')},"
        f" tuned on {seeds.get('tuning', '-')}.\n"
    )
    parts = [summary]
    for profile, figures in results["profiles"].items():
        parts.append(f"\n### Profile `{profile}`\n")
        parts.append(_actions(figures))
        parts.append(_faults(figures["actions"]["faults"]))
        parts.append(_promptness(results["promptness"][profile]))
        parts.append(_nodes(figures, results["tuned"].get(profile, {})))
        parts.append(_recall_of_each(figures["nodes"]))
    parts += _findings(results.get("findings", {}))
    return "\n".join(parts)


def _findings(found: Mapping[str, Any]) -> list[str]:
    """Return what was missed and what was wrong, a line for each."""
    parts = []
    for title, reported in (("Missed", found.get("missed", ())), ("Wrong actions", found.get("wrong", ()))):
        rows = [
            (
                one["profile"],
                one["seed"],
                f"`{one['fault']}`",
                one["nodes"],
                one["step_s"],
                one["interval_s"],
                _said(one),
            )
            for one in reported
        ]
        head = ("profile", "seed", "trace of", "nodes", "step s", "interval s", "said")
        parts += [f"\n### {title}\n", table(head, rows) if rows else "None.\n"]
    return parts


def _said(one: Mapping[str, Any]) -> str:
    reported = one["said"] if isinstance(one["said"], list) else [one]
    places = {True: "right node", False: "wrong node", None: "no node to name"}
    return (
        "; ".join(f"`{t['said']}` {t['action']}, {places[t['right_nodes']]}, {_text(t['after_s'])} s" for t in reported)
        or "nothing"
    )


def _actions(figures: Mapping[str, Any]) -> str:
    """Return Eagle Eye's actions over all traces of the profile."""
    found, quiet = figures["actions"], figures["quiet"]
    overall = found["overall"]
    guilty = {name: count for name, count in figures["guilty"].items() if count}
    rows = [
        ("faults labelled", overall["labelled"]),
        ("precision", overall["precision"]),
        ("recall", overall["recall"]),
        ("F1", overall["f1"]),
        ("localisation", overall["localisation"]),
        ("onset to verdict p50 / p95", f"{_text(overall['delay_p50_s'])} s / {_text(overall['delay_p95_s'])} s"),
        ("false exclusions / false restarts", f"{found['false_exclusions']} / {found['false_restarts']}"),
        ("node-days watched", found["node_days"]),
        (
            "false exclusions per 1,000 node-days, 95% upper bound",
            found["false_exclusions_per_1000_node_days_upper_95"],
        ),
        (
            "of these on traces without a fault: false exclusions / restarts, node-days",
            f"{quiet['false_exclusions']} / {quiet['false_restarts']}, {_text(quiet['node_days'])}",
        ),
        ("looks guilty and was acted on", ", ".join(f"`{n}` {c}" for n, c in guilty.items()) or "none"),
    ]
    return table(("Eagle Eye, actions", ""), rows)


def _faults(faults: Mapping[str, Any]) -> str:
    return table(
        ("fault", "labelled", "recall", "precision", "localisation", "onset to verdict p50 s", "p95 s"),
        [
            (
                f"`{name}`",
                tally["labelled"],
                tally["recall"],
                tally["precision"],
                tally["localisation"],
                tally["delay_p50_s"],
                tally["delay_p95_s"],
            )
            for name, tally in faults.items()
        ],
    )


def _promptness(kinds: Mapping[str, Any]) -> str:
    """Return how soon the verdict came, against what was asked for."""
    head = ("onset to verdict", "asked", "labelled", "found", "in time", "p50 s", "p95 s", "p95 beyond the bound s")
    keys = ("asked", "labelled", "found", "in_time", "delay_p50_s", "delay_p95_s", "beyond_bound_p95_s")
    return table(head, [(name, *(kind[key] for key in keys)) for name, kind in kinds.items()])


def _nodes(figures: Mapping[str, Any], tuned: Mapping[str, Any]) -> str:
    """Return who named the right nodes, a line for each detector."""
    rows = []
    for name, found in figures["nodes"].items():
        quiet = figures["nodes_on_quiet_traces"].get(name, {})
        setting = tuned.get(name, {}).get("setting", {})
        rows.append(
            (
                name,
                found["precision"],
                found["recall"],
                found["f1"],
                found["delay_p50_s"],
                found["delay_p95_s"],
                quiet.get("false"),
                quiet.get("false_per_1000_node_days_upper_95"),
                figures["cost_s"].get(name),
                ", ".join(f"{key} {value:g}" for key, value in setting.items()) or "defaults",
            )
        )
    return table(
        (
            "nodes named",
            "precision",
            "recall",
            "F1",
            "onset to claim p50 s",
            "p95 s",
            "false without a fault",
            "per 1,000 node-days, 95% upper",
            "s a trace",
            "setting",
        ),
        rows,
    )


def _recall_of_each(nodes: Mapping[str, Any]) -> str:
    """Return which detector found the node of which fault: some look for slowness only."""
    faults = sorted({fault for found in nodes.values() for fault in found["faults"]})
    rows = []
    for fault in faults:
        tallies = [found["faults"].get(fault, {}) for found in nodes.values()]
        labelled = max(tally.get("labelled", 0) for tally in tallies)
        rows.append((f"`{fault}`", labelled, *(tally.get("recall") for tally in tallies)))
    return table(("node found, recall", "labelled", *nodes), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; None becomes a dash, ratios get three digits."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_text(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def main() -> int:
    """Print the tables of the results file named on the command line."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m benchmarks.detection.report RESULTS.json\n")
        return 2
    sys.stdout.write(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
