"""``eagle-eye orchestrate command -- PROGRAM [ARGS]``: its options."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from eagle_eye.orchestrators.command.orchestrator import CommandOrchestrator, Programs, ProgramTimeouts
from eagle_eye.orchestrators.errors import OrchestratorError
from eagle_eye.orchestrators.option_values import seconds

# The variables a program needs from the environment. Our own are excluded: they may contain tokens.
PASSED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    add = parser.add_argument
    add("--timeout", type=seconds, default=300.0, metavar="S", help="how long a verb may take (300)")
    add("--state-timeout", type=seconds, default=10.0, metavar="S", help="how long 'state' may take (10)")
    add("--env", action="append", default=[], metavar="KEY=VALUE", help="in the program's environment")
    add("--pass-env", action="append", default=[], metavar="NAME", help="passed on from this environment")
    add("--report-state", action="store_true", help="ask 'state' every --poll seconds for the jobs of --jobs, "
        "which must be names, and tell the server")  # fmt: skip
    add("--resumes", action="store_true", help="the program may be asked again for an action that was interrupted")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM [ARGS]", help="no shell is involved")


def build(options: argparse.Namespace) -> CommandOrchestrator:
    """Return the orchestrator. Raises OrchestratorError naming the option."""
    words = list(options.program or [])
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise OrchestratorError("the program is missing; expected -- PROGRAM [ARGS]")
    found = shutil.which(words[0])
    if found is None:
        raise OrchestratorError(f"program {words[0]!r} is not found or not executable; chmod +x, or give its path")
    globs = [job for job in options.jobs if any(mark in job for mark in "*?[")]
    if options.report_state and (globs or not options.jobs):
        raise OrchestratorError("--report-state: expected the jobs' names in --jobs, not patterns")
    programs = Programs(_environment(options), os.getcwd())  # noqa: PTH109 - a text, as subprocess wants it
    return CommandOrchestrator(
        (str(Path(found).absolute()), *words[1:]),
        programs,
        options.state_dir / "excluded.json",
        ProgramTimeouts(options.state_timeout, options.timeout),
        reported=options.jobs if options.report_state else (),
        resumes=options.resumes,
    )


def _environment(options: argparse.Namespace) -> dict[str, str]:
    environment = {name: os.environ[name] for name in (*PASSED, *options.pass_env) if name in os.environ}
    for assignment in options.env:
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise OrchestratorError(f"--env {assignment!r}: expected KEY=VALUE")
        environment[name] = value
    return environment
