"""The same job and plan under torchrun alone: what a user has without Eagle Eye.

One ``torchrun`` on each node (c10d rendezvous, restarts without end), checkpoints resumed from the newest, collectives
that give up after ``COLLECTIVE_S``. A person looks after it: what is not well ``notice_s`` after a fault, he repairs,
throws numbers away that are none, and starts the job again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.recovery import newest
from benchmarks.recovery.harm import flap, harm, repair
from benchmarks.recovery.newest import COMMAND_VARIABLE, FOLDER_VARIABLE
from benchmarks.recovery.plan import Item
from benchmarks.recovery.site import JOB_ARGUMENTS, MEMBERS, FireStack
from eagle_eye.demo.stack import (
    CORRUPTION_MODULE,
    JOB_VARIABLE,
    NODE_VARIABLE,
    SCRIPT,
    DemoSite,
    StageFailed,
    end_with_parent,
    processes_of,
)

COLLECTIVE_S = 60.0  # torch's own defaults are 10 minutes for NCCL and 30 for Gloo
TRAINS_WITHIN_S = 180.0
STEPS_BEFORE = 5
LOOK_S = 0.2
PORT = 29400
WRAPPER = Path(newest.__file__)


class Torchrun(FireStack):
    """The nodes and the injections of the stack; torchrun in place of server, agents and launcher."""

    def __init__(self, site: DemoSite, folder: Path) -> None:
        super().__init__(site, folder, gpus=False)
        self._runs: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """The job is starting on the first nodes."""
        nodes = self.site.nodes[:MEMBERS]
        arguments = {**JOB_ARGUMENTS, "checkpoints": "storage", "collective-seconds-max": str(COLLECTIVE_S)}
        command = [
            *(str(SCRIPT), "--step-log", str(self.step_log), "--checkpoint-dir", str(self.checkpoints)),
            *(word for key, value in arguments.items() for word in (f"--{key}", value)),
        ]
        for node in nodes:
            words = [
                *("--nnodes", str(MEMBERS), "--nproc-per-node", "1", "--max-restarts", "1000000"),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{nodes[0].address}:{PORT}", "--rdzv-id", self.job),
                *("--local-addr", node.address, "--rdzv-conf", f"is_host={int(node is nodes[0])}"),
            ]
            more = {
                JOB_VARIABLE: self.job, NODE_VARIABLE: node.name, "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": node.interface, "PYTHONPATH": str(CORRUPTION_MODULE),
                "EAGLE_EYE_DEMO_CORRUPTION": str(self.corruption),
                COMMAND_VARIABLE: json.dumps(command), FOLDER_VARIABLE: str(self.checkpoints),
            }  # fmt: skip
            clean = {k: v for k, v in os.environ.items() if not k.startswith("EAGLE_EYE_")}
            with (self.folder / "logs" / f"torchrun-{node.name}.log").open("ab") as log:
                self._runs[node.name] = subprocess.Popen(
                    [*node.prefix, sys.executable, "-m", "torch.distributed.run", *words, str(WRAPPER)],
                    env={**clean, **more}, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    preexec_fn=end_with_parent,  # noqa: PLW1509 - one prctl call, and no thread holds a lock yet
                )  # fmt: skip

    def ended(self, name: str) -> int | None:
        """Return None: agents, which repairs would start again, are none of this arm's."""
        del name
        return None

    def pid(self, name: str) -> int:
        """Return the process id of the node's torchrun."""
        return self._runs[name.removeprefix("agent-")].pid

    def stop(self) -> None:
        """Nothing of the job runs."""
        for run in self._runs.values():
            run.kill()
            run.wait()
        for node in self.site.nodes:
            for process in processes_of(self.job, node.name):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._runs.clear()

    def over(self) -> bool:
        """Return whether a torchrun has given up."""
        return any(run.poll() is not None for run in self._runs.values())

    def close(self) -> None:
        """Every process has ended."""
        self.stop()
        super().close()


@dataclass
class Tally:
    """How torchrun alone has fared since ``began_s``, when the job was at step ``first``."""

    began_s: float
    first: int
    notice_s: float
    alone: int = 0
    helped: int = 0
    unharmed: int = 0
    waits: list[float] = field(default_factory=list)

    def found(self, stack: Torchrun) -> dict[str, Any]:
        """Return it for the report."""
        finite = [step for step in stack.steps() if math.isfinite(step["loss"])]
        took_s = time.time() - self.began_s
        return {
            "items": self.alone + self.helped + self.unharmed,
            "recovered_alone": self.alone,
            "a_person_had_to_help": self.helped,
            "not_injected": self.unharmed,
            "notice_s": self.notice_s,
            "collective_timeout_s": COLLECTIVE_S,
            "first_step_s": sorted(self.waits),
            "seconds": round(took_s, 1),
            "steps": finite[-1]["step"] - self.first,
            "steps_per_hour": round(3600 * (finite[-1]["step"] - self.first) / took_s),
        }


def measure(
    site: DemoSite,
    folder: Path,
    items: Sequence[Item],
    seconds: float,
    notice_s: float,
    say: Callable[[str], None],
    heard: Callable[[dict[str, Any]], None],
) -> None:
    """``heard`` has what torchrun alone makes of the plan in so many seconds, or of all of it if that comes first.

    It is called after every item, so that a run that is interrupted says how far it came.
    """
    with contextlib.closing(Torchrun(site, folder)) as stack:
        stack.start()
        if not _until(lambda: len(stack.steps()) >= STEPS_BEFORE, TRAINS_WITHIN_S):
            raise StageFailed(f"the job does not train under torchrun; logs in {folder / 'logs'}")
        tally = Tally(time.time(), stack.steps()[-1]["step"], notice_s)
        until_s = tally.began_s + seconds
        for item in items:
            if time.time() >= until_s:
                break
            if item.kinds or item.shape == "flapping":  # else an alarm that nobody sends
                _play(stack, item, tally, until_s, say)
                heard(tally.found(stack))
        heard(tally.found(stack))


def _play(stack: Torchrun, item: Item, tally: Tally, until_s: float, say: Callable[[str], None]) -> None:
    """The item was played and what became of it counted, unless time was up first."""
    since_s = time.time()
    if not _until(functools.partial(_trains, stack, since_s), min(until_s - since_s, TRAINS_WITHIN_S)):
        if time.time() < until_s:
            tally.helped += _helped(stack, since_s, until_s)
        return
    time.sleep(item.gap_s)
    at_s = time.time()
    try:
        for kind, node in _victims(item):
            say(f"without Eagle Eye: {kind} on {node}")
            flap(stack, node) if kind == "flapping" else harm(stack, kind, node)
    except StageFailed:
        tally.unharmed += 1
        return
    harmed_s = time.time()
    if _until(functools.partial(_well, stack, harmed_s, item), min(tally.notice_s, until_s - harmed_s)):
        tally.alone += 1
        tally.waits.append(round(_since(stack, harmed_s)[0]["time_s"] - at_s, 2))
    elif time.time() < until_s:
        tally.helped += _helped(stack, at_s, until_s)


def _trains(stack: Torchrun, since_s: float) -> bool:
    return len(_since(stack, since_s)) >= STEPS_BEFORE


def _victims(item: Item) -> list[tuple[str, str]]:
    """Return what happens to whom: the plan's picks among the nodes, which are always the same here."""
    nodes = [f"node{number}" for number in range(1, MEMBERS + 1)]
    first = nodes[int(item.picks[0] * len(nodes))]
    others = [node for node in nodes if node != first]
    second = others[int(item.picks[1] * len(others))]
    kinds = item.kinds or (item.shape,)
    # The driver's word alone harms nobody; what becomes of the process does.
    same = {"gpu_lost": "hang", "gpu_memory": "kill"}
    return [(same.get(kind, kind), node) for kind, node in zip(kinds, (first, second), strict=False)]


def _well(stack: Torchrun, harmed_s: float, item: Item) -> bool:
    """Return whether the job makes steps again that are worth something, at half of its pace or more."""
    steps = _since(stack, harmed_s)
    if item.shape != "flapping" and "slow" in item.kinds and not stack.over():
        # Half of the CPU is still a step now and then: without a restart the node is slow until somebody looks.
        before = [step for step in stack.steps() if step["time_s"] <= harmed_s]
        steps = steps if steps and before and steps[-1]["attempt"] != before[-1]["attempt"] else []
    return len(steps) >= STEPS_BEFORE and all(math.isfinite(step["loss"]) for step in steps)


def _helped(stack: Torchrun, since_s: float, until_s: float) -> int:
    """A person repairs the nodes, removes what was written since, and starts the job again."""
    bad = any(not math.isfinite(step["loss"]) for step in _since(stack, since_s))
    stack.stop()
    for node in stack.site.nodes[:MEMBERS]:
        repair(stack, node.name)
    for path in stack.checkpoints.glob("step_*") if bad else ():
        if path.stat().st_mtime >= since_s:
            shutil.rmtree(path)
    stack.start()
    at_s = time.time()
    _until(lambda: bool(_since(stack, at_s)), min(TRAINS_WITHIN_S, until_s - at_s))
    return 1


def _since(stack: Torchrun, at_s: float) -> list[dict[str, Any]]:
    return [step for step in stack.steps() if step["time_s"] > at_s]


def _until(true: Callable[[], bool], within_s: float) -> bool:
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if true():
            return True
        time.sleep(LOOK_S)
    return False
