"""The nodes: each with the agent's own spool and uplink, and samples of a training job that are made up.

Touches: a folder for each node, connections to the servers, two threads for each node.
"""

from __future__ import annotations

import asyncio
import collections
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.failover.plan import JOBS, NODES_EACH
from benchmarks.soak.faults import SEGMENTATION_FAULT
from benchmarks.soak.fleet import Membership, exits
from eagle_eye.agent.clock import SystemClock
from eagle_eye.agent.collector import Drops
from eagle_eye.agent.transport.servers import Servers
from eagle_eye.agent.transport.spool import Spool
from eagle_eye.agent.transport.uplink import Destination, Uplink
from eagle_eye.schema.frame import WIRE_VERSION, Frame, Rank, block, encode_frame
from eagle_eye.schema.metrics import Scope

GPUS = 2
JOB_NODES = {f"job-{job}": [f"n{job * NODES_EACH + place:02d}" for place in range(NODES_EACH)] for job in range(JOBS)}
INTERVAL_S = 1.0
ROW = "train_step"  # the metric by which rows are counted
KEPT_ROWS = 1_800


class Agent:
    """One node's; its frames say a training step each, until the job stalls."""

    def __init__(self, folder: Path, node: str, urls: Sequence[str], token_file: Path) -> None:
        self.node = node
        self.member: Membership | None = None
        self.stalled = False
        self.times_s: collections.deque[float] = collections.deque(maxlen=KEPT_ROWS)  # of the frames with rows
        self.drops = Drops()
        self._step = 0
        self._made = 0
        self._lock = threading.Lock()
        self._spool = Spool(folder, node, self.drops)
        self._uplink = Uplink(Destination(Servers(urls), token_file), self._spool, self.drops, SystemClock())
        self._uplink.start()

    @property
    def waiting(self) -> int:
        """How many frames no server has acknowledged."""
        return self._made - self._uplink.delivered

    def sample(self, time_s: float) -> None:
        """Make the frame of an interval."""
        rows = {device: {ROW: float(self._step), "gpu_power_watts": 400.0} for device in range(GPUS)}
        self._step += not self.stalled
        with self._lock:
            self._append(time_s, blocks=[block(Scope.DEVICE, rows)])
            self.times_s.append(time_s)
        self._uplink.notify()

    def crash(self) -> None:
        """The process of the node's first rank ends by a segmentation fault."""
        if self.member is None:
            return
        event = exits(self.member, 0, SEGMENTATION_FAULT, goodbye=False)
        with self._lock:
            self._append(time.time(), events=[event])
        self._uplink.notify(urgent=True)

    def close(self) -> None:
        """It sends no more."""
        self._uplink.stop(0.0)
        self._spool.close()

    def _append(self, time_s: float, **more: Any) -> None:
        member = self.member
        ranks = [
            Rank(member.job, member.first_rank + device, member.world, device, attempt=member.attempt)
            for device in range(GPUS if member else 0)
            if member
        ]
        self._spool.append(
            lambda stream, number: encode_frame(
                Frame(
                    version=WIRE_VERSION, node=self.node, boot_id=f"boot-{self.node}", stream=stream, sequence=number,
                    time_s=time_s, interval_s=INTERVAL_S, agent_version="failover", job=member.job if member else None,
                    ranks=ranks, collectors={"failover": "ok"}, **more,
                )
            )
        )  # fmt: skip
        self._made += 1


class Agents:
    """The agents of all jobs' nodes; their tokens are ``ee_NODE``."""

    def __init__(self, folder: Path, urls: Sequence[str]) -> None:
        self._of_node: dict[str, Agent] = {}
        for job, nodes in JOB_NODES.items():
            for node in nodes:
                token_file = folder / f"{node}.token"
                token_file.write_text(f"ee_{node}", encoding="utf-8")
                self._of_node[node] = Agent(folder / node, node, urls, token_file)
            self.begin(job, 0)

    def begin(self, job: str, attempt: int) -> None:
        """The job's ranks are those of another attempt, and it goes on."""
        nodes, number = JOB_NODES[job], list(JOB_NODES).index(job)
        for place, node in enumerate(nodes):
            agent = self._of_node[node]
            agent.member = Membership(job, number, attempt, place * GPUS, len(nodes) * GPUS)
            agent.stalled = False

    def crash(self, job: str, place: int) -> None:
        """A rank on one of the job's nodes crashes; no step of the job finishes any more."""
        for node in JOB_NODES[job]:
            self._of_node[node].stalled = True
        self._of_node[JOB_NODES[job][place]].crash()

    async def run(self) -> None:
        """Send a frame a second from every node, until cancelled."""
        next_s = float(int(time.time()) + 1)
        while True:
            await asyncio.sleep(max(next_s - time.time(), 0.0))
            await asyncio.to_thread(self._sample, next_s)
            next_s += INTERVAL_S

    def rows(self, since_s: float, until_s: float) -> dict[str, int]:
        """Return how many rows each node has made in that time."""
        return {
            node: sum(since_s <= time_s <= until_s for time_s in tuple(agent.times_s))
            for node, agent in self._of_node.items()
        }

    def waiting(self) -> int:
        """Return how many frames no server has acknowledged."""
        return sum(agent.waiting for agent in self._of_node.values())

    def dropped(self) -> dict[str, int]:
        """Return what agents have dropped so far, by reason."""
        found: collections.Counter[str] = collections.Counter()
        for agent in self._of_node.values():
            found.update(agent.drops.snapshot())
        return dict(found)

    def close(self) -> None:
        """Nobody sends any more."""
        for agent in self._of_node.values():
            agent.close()

    def _sample(self, time_s: float) -> None:
        for agent in self._of_node.values():
            agent.sample(time_s)
