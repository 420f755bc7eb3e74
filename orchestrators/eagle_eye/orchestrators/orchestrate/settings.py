"""The options of ``eagle-eye orchestrate``: a TOML file, overridden by the environment, overridden by flags.

Options are declared once, with argparse. ``--state-dir`` is the file's key ``state_dir`` and the environment's
EAGLE_EYE_STATE_DIR; a kind's own options are in its section and prefixed with its name (EAGLE_EYE_SLURM_OWNER).
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import msgspec

from eagle_eye.orchestrators.command_line import address, seconds
from eagle_eye.orchestrators.protocol import Orchestrator
from eagle_eye.schema.configuration import (
    ENVIRONMENT_PREFIX,
    ConfigurationError,
    is_foreign_variable,
    mistyped_variable,
    read_toml,
)
from eagle_eye.schema.names import did_you_mean


class Options(Protocol):
    """The interface of a kind's ``options`` module."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the kind's own options, long ones only."""
        ...

    def build(self, options: argparse.Namespace) -> Orchestrator:
        """Return the orchestrator. Raises OrchestratorError or ValueError with one line for people."""
        ...


class OrchestratorKind(NamedTuple):
    """One kind; ``module`` is imported only when the kind is used."""

    name: str
    module: str
    help: str

    def load(self) -> Options:
        """Return the kind's options module."""
        module: Options = importlib.import_module(self.module)
        return module


KINDS: tuple[OrchestratorKind, ...] = (
    OrchestratorKind("slurm", "eagle_eye.orchestrators.slurm.orchestrator", "drain nodes and requeue jobs in Slurm"),
    OrchestratorKind(
        "torchft", "eagle_eye.orchestrators.torchft.orchestrator", "kill a replica group, have the others train on"
    ),
    OrchestratorKind("command", "eagle_eye.orchestrators.site_program", "run a program of yours for each verb"),
    OrchestratorKind("kubernetes", "eagle_eye.orchestrators.kubernetes.options", "cordon nodes, evict a job's pods"),
)


SYSTEM_FOLDER = Path("/var/lib/eagle-eye")
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class _RaisingParser(argparse.ArgumentParser):
    """Raises instead of exiting the process."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            option = message.partition(": ")[2].split(maxsplit=1)[0].partition("=")[0]
            known = [name for action in self._actions for name in action.option_strings]
            message = f"option {option!r} is unknown{did_you_mean(option, known)}"
        raise ConfigurationError(f"{message}; see {self.prog} --help")


class _Given(argparse.Namespace):
    """Holds only given values: argparse thinks that every name is set, so that it sets no defaults."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def read(kind: OrchestratorKind, arguments: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    """Return the kind's options and the shared ones. Raises ConfigurationError, and SystemExit after --help."""
    parser = _RaisingParser(prog=f"eagle-eye orchestrate {kind.name}", description=kind.help, allow_abbrev=False)
    add_shared(parser)
    shared = _settable(parser)
    kind.load().add_options(parser)
    own = {name: action for name, action in _settable(parser).items() if name not in shared}
    given = _flags(parser, arguments)
    where_file = given.get("config") or environ.get(ENVIRONMENT_PREFIX + "CONFIG")
    table = read_toml(Path(where_file)) if where_file else {}
    values = {
        **_from_file(shared, table, f"{where_file}: "),
        **_from_file(own, _section(table, kind.name, where_file), f"{where_file}: {kind.name}."),
        **_from_environment(shared, environ, ENVIRONMENT_PREFIX),
        **_from_environment(own, environ, f"{ENVIRONMENT_PREFIX}{kind.name.upper()}_"),
        **given,
    }
    _refuse_unknown(table, shared, own, kind, str(where_file))
    _refuse_unknown_variables(environ, f"{ENVIRONMENT_PREFIX}{kind.name.upper()}_", own, shared)
    for name, action in {**shared, **own}.items():
        if name in values:
            continue
        # The end of the command line belongs to the kind.
        if action.required and action.option_strings:
            key = f"{kind.name}.{name}" if name in own else name
            raise ConfigurationError(f"{action.option_strings[0]} is missing; as {key} it may stand in --config too")
        values[name] = _default(action)
    return argparse.Namespace(**values)


def state_folder(kind: str, environ: Mapping[str, str]) -> Path:
    """Return a kind's state folder: the system's if writable, else the user's."""
    if os.access(SYSTEM_FOLDER if SYSTEM_FOLDER.exists() else SYSTEM_FOLDER.parent, os.W_OK | os.X_OK):
        return SYSTEM_FOLDER / f"orchestrate-{kind}"
    state = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME", "/")) / ".local/state")
    return Path(state) / f"eagle-eye/orchestrate-{kind}"


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Add the options of all kinds."""
    add = parser.add_argument
    add("--config", metavar="FILE", help="TOML file; environment and flags override it")
    add("--jobs", action="append", default=[], metavar="GLOB", help="only of these jobs, such as 'llm-*' (all)")
    add("--dry-run", action="store_true", help="change nothing; report what would be done")
    add("--state-dir", type=Path, metavar="DIR", help="what must survive a restart (/var/lib/eagle-eye/... or ~)")
    add("--poll", type=seconds, default=5.0, metavar="S", help="how often jobs are asked for, where that is needed (5)")
    add("--json", action="store_true", help="one JSON object a line on stdout for whatever happens")
    server = parser.add_argument_group("Eagle Eye")
    add = server.add_argument
    add("--server", default="http://127.0.0.1:8470", metavar="URL[,URL...]",
        help="the server, or several of which one leads (http://127.0.0.1:8470)")  # fmt: skip
    add("--token-file", type=Path, metavar="F", help="holds a token of scope operate")
    add("--listen", type=address, default=("127.0.0.1", 8472), metavar="HOST:PORT",
        help="where webhooks, /healthz and /metrics are answered (127.0.0.1:8472)")  # fmt: skip
    add("--webhook-url", default="", metavar="URL", help="the same as the server reaches it, where it differs")
    add("--secret-file", type=Path, metavar="F",
        help="signing secrets of a subscription made by hand, one a line, read again when changed")  # fmt: skip


def _settable(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {action.dest: action for action in parser._actions if action.dest != "help"}


def _flags(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values from the command line. Missing required ones are detected at the end."""
    required = [action for action in parser._actions if action.required]
    for action in required:
        action.required = False
    try:
        given = vars(parser.parse_args(list(arguments), _Given()))
    finally:
        for action in required:
            action.required = True
    # A positional without a value is an empty list.
    return {name: value for name, value in given.items() if value is not None and value != []}


def _section(table: Mapping[str, Any], name: str, file: object) -> Mapping[str, Any]:
    section = table.get(name, {})
    if not isinstance(section, dict):
        raise ConfigurationError(f"{file}: {name}: expected a section, got {section!r}")
    return section


def _refuse_unknown(
    table: Mapping[str, Any], shared: Iterable[str], own: Iterable[str], kind: OrchestratorKind, file: str
) -> None:
    """Refuse unknown keys, except other kinds' sections: one file may serve several."""
    kinds = {known.name for known in KINDS}
    for known, keys, prefix in (
        ([*shared, *sorted(kinds)], table, ""),
        ([*own], table.get(kind.name, {}), f"{kind.name}."),
    ):
        unknown = [key for key in keys if key not in known]
        if unknown:
            near = ", ".join(sorted(known)) or "none"
            meant = did_you_mean(unknown[0], known)
            raise ConfigurationError(f"unknown key {prefix}{unknown[0]} in {file}; known here are {near}{meant}")


def _refuse_unknown_variables(
    environ: Mapping[str, str], prefix: str, own: Iterable[str], shared: Iterable[str]
) -> None:
    known = {prefix + name.upper() for name in own}
    for variable, value in environ.items():
        if variable.startswith(prefix) and variable not in known and not is_foreign_variable(variable, value):
            names = ", ".join(sorted(known)) or "none"
            meant = did_you_mean(variable, known)
            raise ConfigurationError(f"environment variable {variable} is unknown; known are {names}{meant}")
    if wrong := mistyped_variable(environ, known | {ENVIRONMENT_PREFIX + name.upper() for name in shared}):
        raise ConfigurationError(wrong)


def _from_file(actions: Mapping[str, argparse.Action], table: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {name: _converted(action, table[name], where + name) for name, action in actions.items() if name in table}


def _from_environment(
    actions: Mapping[str, argparse.Action], environ: Mapping[str, str], prefix: str
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, action in actions.items():
        variable = prefix + name.upper()
        if variable not in environ:
            continue
        value: Any = environ[variable]
        if _is_switch(action):
            value = _WORDS.get(value.lower(), value)
        elif _is_list(action):
            value = _listed(value)
        found[name] = _converted(action, value, f"environment variable {variable}")
    return found


def _listed(text: str) -> Any:
    """Parse a JSON list, or one item."""
    try:
        return msgspec.json.decode(text) if text.startswith("[") else [text]
    except msgspec.DecodeError:
        return [text]


def _is_switch(action: argparse.Action) -> bool:
    return action.nargs == 0


def _is_list(action: argparse.Action) -> bool:
    return action.nargs in ("*", "+", argparse.REMAINDER) or isinstance(action.default, list)


def _converted(action: argparse.Action, value: Any, where: str) -> Any:
    if _is_switch(action):
        if not isinstance(value, bool):
            raise ConfigurationError(f"{where}: expected true or false, got {value!r}")
        return value
    if _is_list(action):
        if not isinstance(value, list):
            raise ConfigurationError(f"{where}: expected a list, got {value!r}")
        return [_one(action, item, where) for item in value]
    return _one(action, value, where)


def _one(action: argparse.Action, value: Any, where: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigurationError(f"{where}: expected {action.metavar or 'a text or number'}, got {value!r}")
    try:
        made = action.type(str(value)) if callable(action.type) else str(value)
    except argparse.ArgumentTypeError as error:
        raise ConfigurationError(f"{where}: {error}") from None
    except (ValueError, TypeError):
        raise ConfigurationError(f"{where}: expected {action.metavar or action.type}, got {value!r}") from None
    if action.choices is not None and made not in action.choices:
        raise ConfigurationError(f"{where}: expected one of {', '.join(map(str, action.choices))}, got {value!r}")
    return made


def _default(action: argparse.Action) -> Any:
    if isinstance(action.default, str) and callable(action.type):
        return action.type(action.default)
    return list(action.default) if isinstance(action.default, list) else action.default
