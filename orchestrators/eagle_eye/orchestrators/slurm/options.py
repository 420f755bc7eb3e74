"""``eagle-eye orchestrate slurm``: its options and wiring."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import time
from pathlib import Path

from eagle_eye.orchestrators.errors import OrchestratorError
from eagle_eye.orchestrators.fallback_layouts import add_layouts, read_layouts
from eagle_eye.orchestrators.option_values import seconds, token
from eagle_eye.orchestrators.server_client import ServerClient
from eagle_eye.orchestrators.slurm.answers import JobNames
from eagle_eye.orchestrators.slurm.cluster import Cluster, Commands, environment
from eagle_eye.orchestrators.slurm.orchestrator import SlurmOrchestrator
from eagle_eye.orchestrators.slurm.persisted_state import SlurmMemory
from eagle_eye.orchestrators.slurm.restarting import Restarting, RestartTimeouts, Resubmission, Time


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this kind."""
    add = parser.add_argument
    add("--owner", default="eagle-eye", metavar="NAME",
        help="who our drains are signed by; only those of this name are lifted (eagle-eye)")  # fmt: skip
    add("--slurm-bin", default="", metavar="DIR", help="where Slurm's commands are (found on the PATH)")
    add("--slurm-conf", default="", metavar="FILE", help="the cluster's slurm.conf (Slurm's own default)")
    add("--jwt-file", type=Path, metavar="F",
        help="token by which the commands prove themselves to Slurm, as scontrol token prints it (munge)")  # fmt: skip
    add("--command-timeout", type=seconds, default=20.0, metavar="S", help="how long one command may take (20)")
    add("--node-prefix", default="", metavar="COMMAND",
        help="before scontrol where nodes are drained and resumed, as in 'sudo -n -u slurm'")  # fmt: skip
    add("--submit-prefix", default="", metavar="COMMAND",
        help="before sbatch where another user's job that may not be requeued is submitted again, as in "
        "'sudo -n -u {user}'")  # fmt: skip
    add("--stop-within", type=seconds, default=180.0, metavar="S", help="how long a job may take to end (180)")
    add("--run-within", type=seconds, default=600.0, metavar="S", help="how long a requeued job is waited for (600)")
    add("--when-full", choices=("queue", "hold", "refuse"), default="queue",
        help="what becomes of a job whose place nothing free can take now: it waits in the queue, is held, or is left "
        "alone (queue)")  # fmt: skip
    add_layouts(parser)


def build(options: argparse.Namespace) -> SlurmOrchestrator:
    """Return the orchestrator. Raises OrchestratorError naming the option."""
    if re.fullmatch(r"[A-Za-z0-9._@-]{1,64}", options.owner) is None:
        raise OrchestratorError(f"--owner {options.owner!r}: expected letters, digits and '._@-'")
    environ = environment(os.environ, options.slurm_conf)
    commands = Commands(options.slurm_bin, options.command_timeout, environ, options.jwt_file)
    cluster = Cluster(commands, _words("--node-prefix", options.node_prefix))
    clock = Time()
    memory = SlurmMemory(options.state_dir / "slurm.json", clock.now)
    resubmission = Resubmission(cluster, _words("--submit-prefix", options.submit_prefix))
    limits = RestartTimeouts(options.stop_within, options.run_within, options.when_full)
    names = JobNames(ServerClient(options.server, token(options.token_file)), time.monotonic)
    restarting = Restarting(cluster, memory, resubmission, limits, clock)
    return SlurmOrchestrator(cluster, names, memory, restarting, options.owner, read_layouts(options.layouts))


def _words(option: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise OrchestratorError(f"{option} {text!r}: {error}") from None
