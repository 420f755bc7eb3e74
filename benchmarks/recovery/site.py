"""The demo's stack with more spares, budgets for a hundred faults, and simulated GPUs that can fail."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.recovery.gpus import Gpus
from eagle_eye.demo.stack import SERVER_CONFIG, DemoNode, DemoSite, NamespaceSite, Stack, StageFailed

NODES = tuple(f"node{number}" for number in range(1, 9))  # three train; the others are spares or being repaired
MEMBERS = 3
JOB_ARGUMENTS = {"batch": "16"}  # steps that leave this machine to the others on it

# A hundred faults in an hour would be held back, and rightly: a fleet in which so much fails has another problem.
# Here the limits are out of the way, and a node that was repaired comes back without probation.
START_DEADLINE_S = 45.0
BUDGETS = """
exclusions_per_job = 1000
exclusions_fleet_floor = 1000
restarts_per_job = 1000
restarts_fleet = 1000
breaker_actions = 1000
probation_s = 0.0
"""
SOME_NODES = ("--nnodes", f"2:{MEMBERS}")
LAUNCH_FLAGS = (
    *("--restarts-max", "1000", "--backoff", "1", "--settled-after", "20"),
    *("--warm-wait", "15", "--verify-wait", str(int(START_DEADLINE_S))),  # starts take five seconds here
    *("--regroup-wait", "6"),  # one that keeps processes takes a second or two here
    *("--check", "off"),  # simulated GPUs have nothing that a check could see
)
IMPORTS = "eagle_eye.agent.hook,eagle_eye.checkpoint.checkpointer,torch.nn.parallel"
STANDBY_FLAGS = ("--standby", "auto", "--standby-import", IMPORTS)


def config() -> str:
    """Return the demo's configuration with the budgets, and a deadline for starts that take five seconds here."""
    text = SERVER_CONFIG
    for old, new in (
        ("verdict_gone_s = 5.0\n", f"verdict_gone_s = 5.0{BUDGETS}"),
        ("start_deadline_s = 180.0", f"start_deadline_s = {START_DEADLINE_S}"),
    ):
        if text.count(old) != 1:
            raise ValueError(f"the demo's configuration has no {old!r} any more")
        text = text.replace(old, new)
    return text


def can_simulate_gpus() -> str:
    """Return why nodes cannot have GPUs here, "" where they can."""
    if os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("ip")):
        return "no GPU faults: nodes have kernel logs of their own as root alone, with iproute2 and util-linux"
    if not (shutil.which("cc") or shutil.which("gcc")):
        return "no GPU faults: simulated GPUs need a C compiler: apt-get install gcc libc6-dev"
    return ""


class Lines:
    """The JSON objects of a growing file, each read once: a run of hours must not load the machine that it measures."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read_bytes = 0
        self._items: list[dict[str, Any]] = []

    def all(self) -> list[dict[str, Any]]:
        """Return them, oldest first; lines that are none, and one that is half written, are left out."""
        if self._file.exists():
            with self._file.open("rb") as file:
                file.seek(self._read_bytes)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read_bytes += len(whole) + len(newline)
            self._items += [json.loads(line) for line in whole.split(b"\n") if line.startswith(b"{")]
        return list(self._items)


class FireStack(Stack):
    """The demo's processes under a configuration in which a hundred faults in a row are dealt with one by one."""

    def __init__(
        self,
        site: DemoSite,
        folder: Path,
        *,
        gpus: bool,
        arguments: Mapping[str, str] = JOB_ARGUMENTS,
        flags: Sequence[str] = SOME_NODES,
        planned: bool = False,
    ) -> None:
        """``arguments`` are the job's, ``flags`` the launcher's besides LAUNCH_FLAGS, over which they win."""
        flags = (*LAUNCH_FLAGS, *flags)
        super().__init__(site, folder, arguments, config=config(), launch_flags=flags, planned=planned)
        if gpus and not isinstance(site, NamespaceSite):
            raise StageFailed("GPU faults are in the plan, and need nodes in network namespaces: run it without root")
        self._with_gpus = gpus
        self.slow: dict[str, threading.Event] = {}  # by node: set, its ranks run as they should again
        self._reported = Lines(folder / "logs" / "launcher.log")
        self._steps = Lines(self.step_log)
        self.gpus = Gpus(folder / "gpus", (node.name for node in site.nodes), self.step_log)
        # A socket in its place cannot be opened: agents have no kernel log, and take XIDs from the driver.
        self._no_kernel_log = folder / "no-kernel-log"
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(self._no_kernel_log))

    def start(self) -> None:
        """Everything runs, and the GPUs follow the job."""
        self.gpus.start()
        super().start()

    def close(self) -> None:
        """Nothing runs any more."""
        self.gpus.close()
        super().close()

    def reported(self) -> list[dict[str, Any]]:
        """Return what the launchers said, oldest first."""
        return self._reported.all()

    def steps(self) -> list[dict[str, Any]]:
        """Return the job's own step log: time_s, step, attempt, loss, resumed_from."""
        return self._steps.all()

    def _agent_extras(self, node: DemoNode) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
        if not self._with_gpus:
            return node.prefix, (), {}
        own = f'mount --bind {self._no_kernel_log} /dev/kmsg && exec "$@"'
        prefix = (*node.prefix, "unshare", "--mount", "sh", "-c", own, "sh")
        return prefix, ("--simulate",), {"EAGLE_EYE_SIMULATED_GPUS": str(self.gpus.file(node.name))}
