"""The manual page of a package, in roff: made of what the commands say of themselves, so that it cannot fall behind."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator

from recipes import RECIPES, REPOSITORY, epoch_s

# The commands are those of this tree, whichever is installed where this runs.
_PORTIONS = dict.fromkeys(portion for recipe in RECIPES.values() for portion in recipe.portions)
sys.path[:0] = [str(REPOSITORY / portion) for portion in _PORTIONS]
try:
    from eagle_eye.cli import guide, main
except ModuleNotFoundError as error:
    raise SystemExit(f"no module {error.name}; run this in the project's environment: make venv") from None

_FILES = {
    "agent": (
        ("/etc/eagle-eye/agent.toml", "the agent's configuration"),
        ("/var/lib/eagle-eye-agent", "frames that wait for the server, and this node's token"),
        ("/run/eagle-eye/hook.sock", "where training processes report"),
        ("/dev/shm/eagle-eye-UID/NODE", "what eagle-eye-checkpoint-store@USER.service keeps of a user's jobs"),  # noqa: S108
    ),
    "server": (
        ("/etc/eagle-eye/server.toml", "the server's configuration"),
        ("/etc/eagle-eye/orchestrate-KIND.toml", "that of eagle-eye-orchestrate@KIND.service"),
        ("/var/lib/eagle-eye-server", "what the server keeps; eagle-eye backup copies it"),
        ("/var/lib/eagle-eye", "what orchestrators keep of what they were asked"),
    ),
}


def manual(name: str, portions: Iterable[str], version: str) -> str:
    """Return the page of a package that holds these portions: it tells of the commands that it can carry out."""
    role = name.removeprefix("eagle-eye-")
    modules = tuple(f"eagle_eye.{portion}." for portion in portions)
    commands = [command for command in main.COMMANDS if command.module.startswith(modules) and _is_here(command, role)]
    day = time.strftime("%Y-%m-%d", time.gmtime(epoch_s()))
    lines = [
        f'.TH EAGLE-EYE 1 "{day}" "eagle-eye {version}" "User Commands"',
        ".SH NAME",
        f"eagle-eye, {name} \\- finds the faulty node of a distributed training job",
        ".SH SYNOPSIS",
        ".B eagle-eye",
        ".I COMMAND",
        "[\\fIOPTION\\fR ...]",
        ".br",
        ".B eagle-eye",
        "\\-\\-version",
        ".SH DESCRIPTION",
        "An agent on every GPU host streams metrics to a server. Detectors name the faulty node, policy decides, and",
        "signed webhooks make orchestrators act.",
        f"This page tells of the commands in the package {name}; the service is {name}.service.",
        ".SH COMMANDS",
    ]
    for command in commands:
        lines += _command(main.parser_of(command, main.load(command)), guide.GUIDES[command.name])
    lines += [".SH FILES", *_terms(_FILES[role])]
    lines += [".SH ENVIRONMENT", *_terms(_ENVIRONMENT), ".SH SEE ALSO"]
    lines += [f"/usr/share/doc/{name}/docs, journalctl(1), systemctl(1)"]
    return "\n".join(lines) + "\n"


_ENVIRONMENT = (
    ("EAGLE_EYE_KEY", "sets a key of the configuration: EAGLE_EYE_POLICY_MODE is mode of [policy]"),
    ("EAGLE_EYE_SERVER, EAGLE_EYE_TOKEN_FILE", "where the server is and who asks, for the operator's commands"),
    ("EAGLE_EYE_TRACEBACK", "1 shows where an error comes from"),
)


def _is_here(command: main.Command, role: str) -> bool:
    """Whether the package brings the command's libraries: on GPU hosts the operator's commands lack theirs."""
    return role != "agent" or not {"agent", "checkpoint"}.isdisjoint(command.extra.split(","))


def _command(parser: argparse.ArgumentParser, said: guide.Guide) -> Iterator[str]:
    yield f'.SS "{_roff(parser.prog)}"'
    yield _roff(said.purpose)
    yield from _options(parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from (".PP", f"\\fB{_roff(below.prog)}\\fR: {_roff(below.description or '')}")
                yield from _options(below)
    yield from (".PP", "Examples:")
    for command, why in said.examples:
        yield from (".RS 4", ".nf", _roff(command), ".fi", ".RS 4", _roff(why), ".RE", ".RE")
    yield from (".PP", f"Exit codes: {_roff(said.exits)}")
    yield from (".PP", "Read on: " + _roff(" ".join(f"docs/{page}.md" for page in said.pages)))


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if action.dest == "help" or isinstance(action, argparse._SubParsersAction):
            continue
        value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
        shown = ", ".join(action.option_strings) if action.option_strings else str(value)
        if action.option_strings and action.nargs != 0:
            shown += f" {value}"
        yield from (".TP", f"\\fB{_roff(shown)}\\fR", _roff((action.help or "").replace("%%", "%")))


def _terms(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, text in pairs:
        yield from (".TP", f"\\fB{_roff(term)}\\fR", _roff(text))


def _roff(text: str) -> str:
    """Return text that roff prints as it is: nothing in it is a request, hyphens and quotes are ASCII's."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    return "\\&" + escaped if escaped.startswith(".") else escaped
