"""``eagle-eye policy``: explains decisions (``explain``), and runs written test cases (``test``)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from eagle_eye.cli.operator import connect, print_json
from eagle_eye.cli.tables import printable
from eagle_eye.client.http_client import DEFAULT_SERVER
from eagle_eye.schema.record_types import prepare_record_types

ACT: Mapping[str, Any] = {"mode": "act"}  # the cases' default, unless --config says otherwise
NODE_TERMS = "node_terms"  # the rule that says which settings of single nodes applied, shown for each case


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs and their flags."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    explain = verbs.add_parser("explain", help="which rule said what about an incident")
    explain.add_argument("incident", metavar="INCIDENT", help="its id, as eagle-eye incidents lists it")
    explain.add_argument("--server", metavar="URL", help=f"default {DEFAULT_SERVER}")
    explain.add_argument("--token-file", type=Path, metavar="FILE", help="file with a bearer token of scope read")
    explain.add_argument("--all", action="store_true", help="show also the rules that had nothing to judge")
    test = verbs.add_parser("test", help="run written cases; exit code 1 when one fails")
    test.add_argument("file", type=Path, metavar="FILE", help="cases as in docs/reference/policy.md")
    test.add_argument("--config", type=Path, metavar="FILE", help="the server's configuration: its [policy] counts")
    for one in (explain, test):
        one.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the chosen verb. Raises ClientError, ConfigurationError."""
    return _explain(args) if args.verb == "explain" else _test(args)


def _explain(args: argparse.Namespace) -> int:
    client = connect(args.server, args.token_file)
    reported = client.call("GET", f"/api/v1/incidents/{quote(args.incident, safe='')}/policy")
    if args.json:
        print_json(reported)
        return 0
    lines = [f"{reported['fault']} of job {reported['job']}: incident {reported['incident_id']} is {reported['state']}"]
    if reported["hold"]:
        lines.append(f"held by {reported['hold_rule'] or 'policy'}: {reported['hold']}")
    if reported["decision"]:
        lines += ["", f"now: {decision_line(reported['decision'])}", *rule_lines(reported["rules"], args.all)]
    else:
        lines += ["", f"now: {reported['detail']}"]
    for asked in reported["asked"]:
        lines += ["", f"{asked['created']} {asked['kind']}, action {asked['action_id']}, is {asked['state']}:"]
        lines += rule_lines(asked["rules"], args.all)
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
    return 0


def _test(args: argparse.Namespace) -> int:
    import msgspec

    from eagle_eye.schema import configuration
    from eagle_eye.server.backtest.policy_cases import read_cases, run_cases
    from eagle_eye.server.config import ServerConfig
    from eagle_eye.server.site_files import with_racks

    prepare_record_types()
    base = ACT
    if args.config is not None:
        config = configuration.load(ServerConfig, args.config, os.environ, {})
        base = msgspec.to_builtins(with_racks(config.policy, config.topology_file))
    tested = list(run_cases(read_cases(args.file), base))
    failed = [one for one in tested if one.differs]
    if args.json:
        print_json(
            [
                {
                    "name": one.case.name,
                    "passed": not one.differs,
                    "differs": one.differs,
                    "decision": msgspec.to_builtins(one.weighing.decision),
                    "rules": msgspec.to_builtins(one.weighing.words),
                }
                for one in tested
            ]
        )
        return 1 if failed else 0
    lines: list[str] = []
    for one in tested:
        lines.append(f"{'FAILED' if one.differs else 'passed'}  {one.case.name}")
        lines += [f"        {difference}" for difference in one.differs]
        shown = [word for word in one.weighing.words if one.differs or word.rule == NODE_TERMS]
        lines += rule_lines(msgspec.to_builtins(shown), every=False)
    lines.append(f"{len(tested) - len(failed)} of {len(tested)} cases passed")
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
    return 1 if failed else 0


def decision_line(decision: Mapping[str, Any]) -> str:
    """Return a decision as one line."""
    words = [decision["kind"], *decision["exclude"]]
    if decision["restart"]:
        words.append("and restart the job")
    line = " ".join(words)
    if decision["hold"]:
        return f"{line}, held by {decision['rule']}"
    return f"{line}, mode {decision['mode']}" if decision["kind"] not in ("notify", "none") else line


def rule_lines(rules: Sequence[Mapping[str, Any]], every: bool) -> list[str]:
    """Return one line per rule with its reason or else its values; ``every``: also the idle ones."""
    lines = []
    for rule in rules:
        if rule["outcome"] != "not_applicable" or every:
            given = {name: value for name, value in rule["values"].items() if value not in (None, "")}
            said = rule["reason"] or ", ".join(f"{name} {_value(value)}" for name, value in given.items())
            lines.append(f"  {rule['outcome'].replace('_', ' '):<14} {rule['rule']:<17} {said}".rstrip())
    return lines


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}" if abs(value) < 1e6 else f"{value:.0f}"
