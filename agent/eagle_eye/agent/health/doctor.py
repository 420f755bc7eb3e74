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

from eagle_eye.agent.collectors.clock_offset import ClockOffsetCollector
from eagle_eye.agent.collectors.host import HostCollector
from eagle_eye.agent.collectors.kernel_log import KernelLogCollector
from eagle_eye.agent.collectors.mounts import ANSWER_S, MountsCollector
from eagle_eye.agent.collectors.network_ports import FabricCollector
from eagle_eye.agent.collectors.nvml import NvmlCollector
from eagle_eye.agent.collectors.temperature import TemperatureCollector
from eagle_eye.agent.config import AgentConfiguration, hook_socket_path, read, spool_folder, token_path
from eagle_eye.agent.health import doctor_checks, running_agent
from eagle_eye.agent.health.doctor_checks import HostFinding, State
from eagle_eye.agent.loop.collector import Collector
from eagle_eye.agent.loop.drops import Drops
from eagle_eye.agent.loop.runner import CollectorRunner
from eagle_eye.agent.loop.tick_result import CollectorStanding
from eagle_eye.agent.processes.node_names import conflicts, node_names

COLLECT_S = 20.0  # for all collectors together: a driver without persistence mode needs seconds per GPU

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
        findings = examine(read(args.config, os.environ, flags), _collectors(), os.environ)
    else:
        found = running_agent.find(os.environ)
        findings = [found.finding, *examine(found.configuration, _collectors(), found.environ)]
    if args.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2, ensure_ascii=False))
    else:
        table(findings, sys.stdout, colours=sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    return 1 if any(finding.state == "failed" for finding in findings) else 0


def examine(
    configuration: AgentConfiguration | None, collectors: Sequence[Collector], environ: Mapping[str, str]
) -> list[HostFinding]:
    """Return all findings; without a configuration those that need none.

    Each collector runs once in a thread of its own and is closed.
    """
    return [
        *doctor_checks.collectors(standings(collectors)),
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


def standings(collectors: Sequence[Collector], within_s: float = COLLECT_S) -> list[CollectorStanding]:
    """Return each collector's standing after one collection; all share ``within_s``."""
    runners = [CollectorRunner(collector, Drops(), time.monotonic) for collector in collectors]
    for runner in runners:
        runner.ask(time.time())
    deadline_s = time.monotonic() + within_s
    for runner in runners:
        runner.answer(deadline_s - time.monotonic())
    for runner in runners:
        runner.close()
    return [runner.standing() for runner in runners]


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


def _collectors() -> list[Collector]:
    """Return the read-only collectors: the hook's socket and log positions belong to the agent."""
    return [
        HostCollector(),
        NvmlCollector(),
        FabricCollector(),
        KernelLogCollector(Drops()),
        MountsCollector(patience_s=2 * ANSWER_S),
        ClockOffsetCollector(),
        TemperatureCollector(),
    ]


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)
