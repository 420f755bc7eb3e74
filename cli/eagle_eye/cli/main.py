"""The command ``eagle-eye``: finds the subcommand, loads its module, returns its exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted. Errors are one line on stderr;
EAGLE_EYE_TRACEBACK=1 shows where they come from.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import io
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from eagle_eye.cli import guide
from eagle_eye.cli.arguments import CommandLineParser, one_line, shown
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.names import did_you_mean
from eagle_eye.schema.record_types import prepare_record_types

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130


class Subcommand(Protocol):
    """The interface of a command's module, or of the object that it names."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's flags."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Run it and return the exit code. May raise ConfigurationError for wrong configuration."""
        ...


class Command(NamedTuple):
    """One subcommand: ``module`` (or ``module:object``) is imported only when used.

    ``extra`` names what to install for it, "" when it needs nothing beside the base.
    """

    name: str
    module: str
    help: str
    extra: str


GROUPS: tuple[tuple[str, tuple[Command, ...]], ...] = (
    (
        "try it out",
        (
            Command(
                "demo", "eagle_eye.demo.command", "the closed loop on this host", "server,orchestrators,checkpoint"
            ),
            Command("simulate", "eagle_eye.simulator.command", "write a labelled trace of a fault", "server"),
            Command("backtest", "eagle_eye.cli.backtest", "judge recorded traces", "server"),
            Command(
                "replay", "eagle_eye.cli.traces:REPLAY", "send a trace to a server as if it happened now", "server"
            ),
            Command("loadtest", "eagle_eye.simulator.load.command", "load a server like a large fleet", "server"),
        ),
    ),
    (
        "run",
        (
            Command("server", "eagle_eye.server.command", "take frames, find faults, notify subscribers", "server"),
            Command("agent", "eagle_eye.agent.command", "watch this host and send what it sees", "agent"),
            Command(
                "launch",
                "eagle_eye.orchestrators.launch.command",
                "run a job that restarts without bad nodes",
                "orchestrators",
            ),
            Command(
                "orchestrate",
                "eagle_eye.orchestrators.orchestrate.command",
                "have Slurm, Kubernetes or your tool act",
                "orchestrators",
            ),
            Command("checkpoint", "eagle_eye.checkpoint.command", "keep checkpoints in memory", "checkpoint"),
            Command("plan", "eagle_eye.planning.command", "plan how a job goes on with fewer nodes", "checkpoint"),
        ),
    ),
    (
        "look",
        (
            Command("incidents", "eagle_eye.cli.operator:INCIDENTS", "what is wrong; acknowledge, resolve", "server"),
            Command("nodes", "eagle_eye.cli.nodes:NODES", "list nodes; exclude, drain, readmit, check", "server"),
            Command("jobs", "eagle_eye.cli.operator:JOBS", "list jobs; who takes part, how far they are", "server"),
            Command("goodput", "eagle_eye.cli.accounts:GOODPUT", "where the jobs' time went, and why", "server"),
            Command("accounts", "eagle_eye.cli.accounts:ACCOUNTS", "a report on lost time, as a file", "server"),
            Command(
                "ledger",
                "eagle_eye.cli.accounts:LEDGER",
                "what policy would have done, against what happened",
                "server",
            ),
            Command("audit", "eagle_eye.cli.operator:AUDIT", "who changed what", "server"),
            Command(
                "flight-recorder",
                "eagle_eye.server.admin.flight_recorder_command",
                "which rank holds up a hung job",
                "server",
            ),
        ),
    ),
    (
        "act",
        (
            Command(
                "actions",
                "eagle_eye.cli.operator:ACTIONS",
                "list actions; approve, reject, withdraw, renew, report",
                "server",
            ),
            Command("check", "eagle_eye.checks.command", "test this node: is it sick?", "agent,ml"),
            Command("policy", "eagle_eye.cli.policy", "why something was done or not; test your rules", "server"),
            Command("deliveries", "eagle_eye.cli.operator:DELIVERIES", "list deliveries; redeliver", "server"),
            Command("subscriptions", "eagle_eye.cli.notifications:SUBSCRIPTIONS", "who gets webhooks", "server"),
            Command(
                "silences", "eagle_eye.cli.notifications:SILENCES", "mute the news of a fault, job or node", "server"
            ),
            Command("tickets", "eagle_eye.cli.accounts:TICKETS", "list and import repair tickets", "server"),
        ),
    ),
    (
        "administer",
        (
            Command("doctor", "eagle_eye.agent.doctor", "what works on this host, what doesn't", "agent"),
            Command("tokens", "eagle_eye.server.admin.tokens_command", "make, list and revoke tokens", "server"),
            Command("sessions", "eagle_eye.cli.operator:SESSIONS", "sign a person out everywhere", "server"),
            Command("backup", "eagle_eye.server.admin.backup_command", "copy the running server's files", "server"),
            Command("records", "eagle_eye.server.admin.records_command", "move the records to PostgreSQL", "server"),
            Command("cells", "eagle_eye.cli.operator:CELLS", "which server judges which jobs; move them", "server"),
            Command("record", "eagle_eye.cli.traces:RECORD", "write a trace from a server's history", "server"),
            Command("import", "eagle_eye.cli.traces:IMPORT", "write a trace from an existing Prometheus", "server"),
            Command("train", "eagle_eye.learning.command", "learn what healthy nodes look like", "server,ml"),
            Command("completion", "eagle_eye.cli.completion", "complete commands in your shell", "server"),
        ),
    ),
)
COMMANDS = tuple(command for _, commands in GROUPS for command in commands)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; never raises the command's errors."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal lacks ends no command
    name = arguments[0] if arguments else ""
    command = next((known for known in COMMANDS if known.name == name), None)
    try:
        return _run(command, arguments[1:]) if command else _overview(arguments)
    except SystemExit as leaving:
        # argparse exits this way: 0 after --help, 2 after wrong usage.
        return leaving.code if isinstance(leaving.code, int) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except ConfigurationError as error:
        return _fail(name, str(error), WRONG_USAGE)
    except BrokenPipeError:
        # The reader of our output (head, less) has closed it; closing stdout again would raise.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - lives as long as the process
        return FAILED
    except Exception as error:
        if os.environ.get("EAGLE_EYE_TRACEBACK") == "1":
            raise
        return _fail(name, str(error) or type(error).__name__, FAILED)


def version() -> str:
    """Return the installed version."""
    try:
        return importlib.metadata.version("eagle-eye")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _run(command: Command, arguments: list[str]) -> int:
    try:
        subcommand = load(command)
        prepare_record_types()
        return subcommand.run(parser_of(command, subcommand).parse_args(arguments))
    except ModuleNotFoundError as error:
        # Heavy or rarely needed modules are imported by some commands at run time.
        missing = error.name or ""
        if missing.partition(".")[0] != "eagle_eye":
            return _fail(command.name, f'needs: pip install "eagle-eye[{command.extra}]" (no module {missing})', FAILED)
        return _fail(command.name, f"is not part of this installation (no module {missing})", FAILED)


def parser_of(command: Command, subcommand: Subcommand) -> argparse.ArgumentParser:
    """Return the command's parser with its complete ``--help``."""
    parser = CommandLineParser(prog=f"eagle-eye {command.name}")
    subcommand.configure(parser)
    guide.complete(parser, command.name)
    return parser


def load(command: Command) -> Subcommand:
    """Return the command's module or object. Raises ModuleNotFoundError where its dependencies are not installed."""
    module, _, attribute = command.module.partition(":")
    loaded = importlib.import_module(module)
    subcommand: Subcommand = getattr(loaded, attribute) if attribute else loaded
    return subcommand


def _overview(arguments: Sequence[str]) -> int:
    parser = CommandLineParser(
        prog="eagle-eye",
        usage="eagle-eye [--version] COMMAND ...",
        description="Finds the faulty node of a distributed training job.",
        epilog=guide.overview((title, [(one.name, one.help) for one in commands]) for title, commands in GROUPS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"eagle-eye {version()}")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="one of the commands below")
    known, _ = parser.parse_known_args(arguments)
    if known.command is None:
        parser.print_help(sys.stderr)
        return WRONG_USAGE
    names = [command.name for command in COMMANDS]
    expected = f"expected one of {', '.join(names)}{did_you_mean(known.command, names)}"
    return _fail("", f"command {shown(known.command)} is unknown; {expected}", WRONG_USAGE)


def _fail(name: str, message: str, code: int) -> int:
    sys.stderr.write(f"eagle-eye {name}".rstrip() + f": {one_line(message)}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
