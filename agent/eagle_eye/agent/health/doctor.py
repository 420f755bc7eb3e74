"""The command ``eagle-eye doctor``: what works on this host, what doesn't, and how to fix it."""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from eagle_eye.agent.assembly import host_collectors
from eagle_eye.agent.collectors.clock_offset import ClockOffsetCollector
from eagle_eye.agent.collectors.host import HostCollector
from eagle_eye.agent.collectors.temperature import TemperatureCollector
from eagle_eye.agent.config import AgentConfiguration, hook_socket_path, read, spool_folder, token_path
from eagle_eye.agent.health import doctor_checks, running_agent
from eagle_eye.agent.health.doctor_checks import HostFinding, State
from eagle_eye.agent.health.host_look import look, repaired_s
from eagle_eye.agent.health.host_verdict import judge
from eagle_eye.agent.loop.collector import Collector
from eagle_eye.agent.loop.drops import Drops
from eagle_eye.agent.loop.runner import CollectorRunner
from eagle_eye.agent.processes.node_names import conflicts, node_names

_COLOURS: Mapping[State, str] = {"ok": "32", "note": "0", "unsupported": "2", "failed": "31"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.description = "Says what works on this host, what doesn't, and what to do about it. Changes nothing."
    parser.add_argument("--config", type=Path, metavar="FILE", help="the agent's TOML file (that of the running agent)")
    parser.add_argument("--server", metavar="URL", help="where frames go")
    parser.add_argument("--node", metavar="NAME", help="this node's name (the host's name)")
    parser.add_argument("--token-file", metavar="FILE", help="file with the node's token")
    parser.add_argument("--json", action="store_true", help="findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Examine the host and report; return 1 when action is needed. Raises ConfigurationError."""
    logging.getLogger("eagle_eye.agent").setLevel(logging.CRITICAL)  # collectors' log messages appear in the table
    flags = {"server": args.server, "node": args.node, "token_file": args.token_file}
    if args.config is not None or any(flags.values()):
        configuration = read(args.config, os.environ, flags)
        findings = examine(configuration, _collectors(spool_folder(configuration, os.environ)), os.environ)
    else:
        found = running_agent.find(os.environ)
        known = found.configuration
        folder = None if known is None else spool_folder(known, found.environ)
        findings = [found.finding, *examine(known, _collectors(folder), found.environ)]
    if args.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2, ensure_ascii=False))
    else:
        table(findings, sys.stdout, colours=sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    return 1 if any(finding.state == "failed" for finding in findings) else 0


def examine(
    configuration: AgentConfiguration | None, collectors: Sequence[Collector], environ: Mapping[str, str]
) -> list[HostFinding]:
    """Return all findings; without a configuration those that need none.

    The collectors look in threads of their own, and are closed. The verdict is that of ``agent --once --check``.
    """
    seen = look([CollectorRunner(collector, Drops(), time.monotonic) for collector in collectors])
    repaired = 0.0 if configuration is None else repaired_s(spool_folder(configuration, environ))
    expected = -1 if configuration is None else configuration.nvrx_health_gpus
    return [
        *doctor_checks.collectors(seen.collectors),
        *doctor_checks.host(judge(seen, expected if expected >= 0 else None, repaired)),
        *doctor_checks.gpu_driver(),
        *([] if configuration is None else _configured(configuration, environ)),
        *doctor_checks.permissions(),
        *doctor_checks.programs(),
    ]


def _configured(configuration: AgentConfiguration, environ: Mapping[str, str]) -> list[HostFinding]:
    pod = "KUBERNETES_SERVICE_HOST" in environ
    named = node_names(configuration.node, socket.gethostname(), "", environ, pod=pod)
    return [
        *doctor_checks.hook_socket(hook_socket_path(configuration)),
        *doctor_checks.spool(spool_folder(configuration, environ), configuration.spool_bytes_max),
        *doctor_checks.server(configuration, token_path(configuration, environ)),
        *doctor_checks.names(conflicts(named)),
        *doctor_checks.training_logs(configuration.metrics_listen),
    ]


def table(findings: Sequence[HostFinding], out: TextIO, *, colours: bool) -> None:
    """Write findings as aligned lines, with remedies, and their counts; a GPU host does not have rich."""
    width = max((len(finding.subject) for finding in findings), default=0)
    for finding in findings:
        state = f"{finding.state:<11}"
        if colours:
            state = f"\033[{_COLOURS[finding.state]}m{state}\033[0m"
        out.write(f"{state} {finding.subject:<{width}}  {_one_line(finding.detail)}\n")
        if finding.remedy:
            out.write(f"{'':<11} {'':<{width}}  -> {_one_line(finding.remedy)}\n")
    failed = sum(finding.state == "failed" for finding in findings)
    out.write(f"{failed} to be done\n" if failed else "nothing to be done\n")


def _collectors(state_folder: Path | None = None) -> list[Collector]:
    """Return the read-only collectors: the hook's socket and log positions belong to the agent."""
    return [HostCollector(), *host_collectors(Drops(), state_folder), ClockOffsetCollector(), TemperatureCollector()]


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)
