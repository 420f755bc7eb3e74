"""``eagle-eye orchestrate KIND``: a webhook subscriber that uses the site's own tools to restart and exclude."""

from __future__ import annotations

import argparse
import contextlib
import os

from eagle_eye.orchestrators import command_line
from eagle_eye.orchestrators.orchestrate import settings
from eagle_eye.orchestrators.orchestrate.settings import KINDS
from eagle_eye.orchestrators.protocol import OrchestratorError
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.record_types import prepare_record_types


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the kinds; a kind's options are read once it is known."""
    parser.usage = "eagle-eye orchestrate KIND [--dry-run] [OPTIONS]"
    parser.description = "Carries out what Eagle Eye asks for, with the site's own tools, and reports what came of it."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "kinds:\n" + "\n".join(f"  {kind.name:<12} {kind.help}" for kind in KINDS)
    parser.add_argument("kind", metavar="KIND", help="one of the kinds below; KIND --help shows its options")
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="OPTIONS", help="what the kind takes")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns 0, 1 on a failure, 2 for wrong usage."""
    kind = next((known for known in KINDS if known.name == args.kind), None)
    if kind is None:
        names = ", ".join(known.name for known in KINDS)
        raise ConfigurationError(f"kind {args.kind!r} is unknown; expected one of {names}")
    options = settings.read(kind, args.options, os.environ)
    command_line.to_stderr()
    # Imported late: --help needs no web server.
    from eagle_eye.orchestrators.orchestrate.service import Service

    prepare_record_types()
    options.state_dir = (options.state_dir or settings.state_folder(kind.name, os.environ)).absolute()
    try:
        service = Service(kind, options)
    except (OrchestratorError, ValueError) as error:
        raise ConfigurationError(str(error)) from None
    with contextlib.closing(service):
        return service.run()
