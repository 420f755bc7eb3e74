"""Finds the agent that runs on this host, and the configuration with which it runs."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from eagle_eye.agent.config import AgentConfiguration, read
from eagle_eye.agent.health.doctor_checks import HostFinding
from eagle_eye.schema.configuration import ConfigurationError

SYSTEM_CONFIG = Path("/etc/eagle-eye/agent.toml")  # of the host packages
PROC = Path("/proc")
PROCESSES_MAX = 100_000  # looked through
_PROGRAMS = ("eagle-eye", "eagle_eye.cli.main", "main.py")
_FLAGS = {"--server": "server", "--node": "node", "--token-file": "token_file", "--spool": "spool_dir"}
_FLAGS |= {"--hook-socket": "hook_socket"}


class RunningAgent(NamedTuple):
    """An agent's process: its configuration file (None: it has none), the flags over it, and its environment."""

    pid: int
    config: Path | None
    flags: Mapping[str, str | None]
    environ: Mapping[str, str]


class HostConfiguration(NamedTuple):
    """The configuration on this host, None if it cannot be read; ``environ`` is that of whoever runs with it."""

    configuration: AgentConfiguration | None
    environ: Mapping[str, str]
    finding: HostFinding


def find(environ: Mapping[str, str], *, proc: Path = PROC, system_config: Path = SYSTEM_CONFIG) -> HostConfiguration:
    """Return the running agent's configuration, else that of the host's packages, else the defaults.

    Raises ConfigurationError for an invalid configuration.
    """
    running = sorted(_running(proc), key=lambda agent: agent.pid)
    if len(running) == 1:
        return _of(running[0], environ)
    if running:
        pids = ", ".join(str(one.pid) for one in running)
        finding = HostFinding("agent", "note", f"several run here (processes {pids}): --config says which is meant")
        return HostConfiguration(read(None, environ, {}), environ, finding)
    if os.access(system_config, os.R_OK):
        finding = HostFinding("agent", "note", f"none runs here; {system_config} is used")
        return HostConfiguration(read(system_config, environ, {}), environ, finding)
    finding = HostFinding("agent", "note", "none runs here; the defaults and EAGLE_EYE_* variables are used")
    return HostConfiguration(read(None, environ, {}), environ, finding)


def _of(agent: RunningAgent, environ: Mapping[str, str]) -> HostConfiguration:
    if agent.config is not None and not os.access(agent.config, os.R_OK):
        detail = f"process {agent.pid} runs with {agent.config}, which cannot be read"
        return HostConfiguration(None, environ, HostFinding("agent", "failed", detail, "run this as the agent's user"))
    try:
        configuration = read(agent.config, agent.environ, agent.flags)
    except ConfigurationError as error:
        raise ConfigurationError(f"process {agent.pid} runs with {agent.config}: {error}") from None
    with_what = agent.config or "flags and environment alone"
    finding = HostFinding("agent", "ok", f"process {agent.pid} runs with {with_what}, which is used here")
    return HostConfiguration(configuration, agent.environ, finding)


def _running(proc: Path) -> Iterator[RunningAgent]:
    with os.scandir(proc) as entries:
        numbered = (entry for entry in entries if entry.name.isdigit())
        for _, entry in zip(range(PROCESSES_MAX), numbered, strict=False):
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                if (agent := _agent(Path(entry.path))) is not None:
                    yield agent


def _agent(process: Path) -> RunningAgent | None:
    words = (process / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    place = next(
        (at for at in range(1, len(words)) if words[at] == "agent" and Path(words[at - 1]).name in _PROGRAMS), None
    )
    if place is None:
        return None
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config", type=Path)
    for flag, key in _FLAGS.items():
        parser.add_argument(flag, dest=key)
    given = vars(parser.parse_known_args(words[place + 1 :])[0])
    config: Path | None = given.pop("config")
    folder = (process / "cwd").readlink()
    pairs = (process / "environ").read_bytes().decode(errors="replace").split("\0")
    environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return RunningAgent(int(process.name), None if config is None else folder / config, given, environ)
