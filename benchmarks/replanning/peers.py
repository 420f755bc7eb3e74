"""The same job kept running by others: plain torchrun, whose agents restart all, and replica groups of torchft.

Both are tuned for the storm: what has a timeout has one of seconds, which by default is minutes, and nothing is taken
from them but what is said here. The store that agents of torchrun meet at, and torchft's lighthouse, are where no fault
strikes. A process that ends is started again at once, and a node that was cut off starts its own anew when it is back.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.recovery import harm as harming
from benchmarks.recovery.harm import Harm
from benchmarks.recovery.site import Lines
from benchmarks.replanning import planned
from benchmarks.replanning.planned import STEP_S, trains
from benchmarks.torchft.processes import await_answer, ended, lighthouse
from eagle_eye.demo.stack import (
    GLOBAL_BATCH,
    JOB_VARIABLE,
    NODE_VARIABLE,
    DemoNode,
    DemoSite,
    StageFailed,
    end_with_parent,
    free_port,
    processes_of,
)

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT_STEPS = 10  # what the job of pipelines has on storage by default
STEPS_FOR_EVER = 1_000_000
AGAIN_S = 1.0  # between two starts on a node, at least
# Of the rendezvous: a node that says nothing for as long is out of it (15 s by default), and it waits no longer for
# more nodes than the fewest (30 s).
KEEP_ALIVE_S, KEEP_ALIVES = 1, 3
LAST_CALL_S = 2
STORE = (
    "import sys, threading; from torch.distributed import TCPStore; "
    "s = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False, multi_tenant=True); "
    "threading.Event().wait()"
)


class Peer(ABC):
    """The job on the site's nodes, and on each a process that keeps its part running."""

    script: Path

    def __init__(self, site: DemoSite, folder: Path, collective_s: float) -> None:
        """``collective_s``: a collective that waits longer has failed."""
        self.site, self.job = site, f"peer-{secrets.token_hex(3)}"
        self.step_log, self.corruption, self._checkpoints = folder / "steps.jsonl", folder, folder / "checkpoints"
        self._folder, self._collective_s = folder, collective_s
        self._steps = Lines(self.step_log)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started_s: dict[str, float] = {}
        self._cut: set[str] = set()
        self._port = free_port(site.head_address)
        self._checkpoints.mkdir()

    def start(self) -> None:
        """The nodes start to train."""
        self._head = self._start_head()
        for node in self.site.nodes:
            self._start(node)

    def members(self) -> Sequence[str]:
        """Return all nodes: nobody has excluded any."""
        return [node.name for node in self.site.nodes]

    def harm(self, kind: str, node: str) -> Harm:
        """The fault is there. Raises StageFailed where the node runs nothing that could be harmed."""
        done = harming.harm_any(self, kind, node)
        if kind == "unreachable":
            self._cut.add(node)
        return done

    def repair(self, node: str) -> None:
        """Nothing of what was done to the node is left; one that was cut off starts anew."""
        self.site.mend(node)
        harming.go_on(self, node)
        if node in self._cut:
            self._end(node)
            self._cut.remove(node)

    def tick(self) -> None:
        """A node whose process has ended has a new one."""
        for node in self.site.nodes:
            process = self._processes[node.name]
            waited = time.monotonic() - self._started_s[node.name] > AGAIN_S
            if node.name not in self._cut and waited and process.poll() is not None:
                self._start(node)

    def steps(self) -> list[dict[str, Any]]:
        """Return the job's step log: time_s, step, attempt, ranks, samples, loss."""
        return self._steps.all()

    def full(self) -> bool:
        """Whether all nodes train."""
        return trains(self.steps(), len(self.site.nodes))

    def wait_full(self) -> None:
        """All nodes train. Raises StageFailed where they do not in time."""
        until_s = time.monotonic() + planned.STARTED_WITHIN_S
        while not self.full():
            self.tick()
            if time.monotonic() > until_s:
                raise StageFailed(f"all nodes train: not within {planned.STARTED_WITHIN_S:g} s; logs in {self._folder}")
            time.sleep(planned.LOOK_S)

    def pid(self, name: str) -> int:
        """Return the process id of "agent-NODE": what keeps the node's part running."""
        return self._processes[name.removeprefix("agent-")].pid

    def close(self) -> None:
        """Nothing runs any more."""
        for node in self._processes:
            self._end(node)
        ended(self._head)

    @abstractmethod
    def _start_head(self) -> subprocess.Popen[bytes]:
        """What the nodes meet at is starting."""

    @abstractmethod
    def _command(self, node: DemoNode, script: Sequence[str]) -> list[str]:
        """Return the words that keep the script running on the node."""

    def _start(self, node: DemoNode) -> None:
        script = (
            *(str(self.script), "--global-batch", str(GLOBAL_BATCH), "--step-log", str(self.step_log)),
            *("--nodes", str(len(self.site.nodes)), "--step-seconds", str(STEP_S)),
            *("--collective-seconds-max", str(self._collective_s)),
            *("--checkpoint-dir", str(self._checkpoints), "--checkpoint-every", str(CHECKPOINT_STEPS)),
        )
        # By these two the ranks are found, and the agents of torchrun are not taken for some.
        tagged = ("env", f"{JOB_VARIABLE}={self.job}", f"{NODE_VARIABLE}={node.name}", sys.executable, *script)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("EAGLE_EYE_")}
        own = {
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": node.interface,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with (self._folder / f"{node.name}.log").open("ab") as log:
            self._processes[node.name] = subprocess.Popen(
                [*node.prefix, *self._command(node, tagged)],
                env={**clean, **own}, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509 - one prctl call, and no thread holds a lock yet
            )  # fmt: skip
        self._started_s[node.name] = time.monotonic()

    def _end(self, node: str) -> None:
        self._processes[node].kill()
        for process in processes_of(self.job, node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._processes[node].wait()


class Torchrun(Peer):
    """Plain torchrun, elastic: all ranks are restarted on the nodes that are there, from the newest checkpoint."""

    script = Path(__file__).with_name("plain_train.py")

    def _start_head(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", STORE, self.site.head_address, str(self._port)])

    def _command(self, node: DemoNode, script: Sequence[str]) -> list[str]:
        meeting = f"is_host=false,last_call_timeout={LAST_CALL_S},keep_alive_interval={KEEP_ALIVE_S}"
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{len(self.site.nodes)}"),
            *("--nproc-per-node", "1", "--max-restarts", "1000", "--local-addr", node.address),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.site.head_address}:{self._port}"),
            *("--rdzv-id", self.job, "--rdzv-conf", f"{meeting},keep_alive_max_attempt={KEEP_ALIVES}"),
            *("--no-python", *script, "--steps", str(STEPS_FOR_EVER)),
        ]


class Torchft(Peer):
    """A replica group of torchft on each node: the others train on without it, and it takes its state from them."""

    script = Path(__file__).with_name("torchft_train.py")

    def _start_head(self) -> subprocess.Popen[bytes]:
        if importlib.util.find_spec("torchft") is None:
            raise StageFailed("torchft is not installed: make test-full, or pip install torchft==0.2.0")
        process = lighthouse(self._port, self._folder, address=self.site.head_address)
        await_answer(f"{self._url}/status")
        return process

    @property
    def _url(self) -> str:
        return f"http://{self.site.head_address}:{self._port}"

    def _command(self, node: DemoNode, script: Sequence[str]) -> list[str]:
        group = self.members().index(node.name)
        return [*script, "--group", str(group), "--address", node.address, "--lighthouse", self._url]
