"""A fleet on a clock that moves when told to, in front of the real detection loop, policy and store, in mode act."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from eagle_eye.schema.action import MemberRank
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import WIRE_VERSION, Frame, Rank, block
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.engine.engine import Engine
from eagle_eye.server.engine.judgement import SchedulerReports
from eagle_eye.server.engine.settings import DetectionSettings, PolicySettings
from eagle_eye.server.jobs.reconcile import agreed_state
from eagle_eye.server.model.records import Job
from eagle_eye.server.monitor.detection_loop import DetectionLoop
from eagle_eye.server.store.sql_store import open_file
from eagle_eye.server.store.store import ACTIONS, INCIDENTS, JOBS, NODES, Change

START_S = 1_700_000_000.0
JOB, NEIGHBOUR = "train", "neighbour"
STEP_S = 2.0
COLLECTIVES_PER_STEP = 4.0


@dataclass
class Clocks:
    """Wall and monotonic time, which can be torn apart."""

    wall_s: float = START_S
    steady_s: float = 0.0

    def now_s(self) -> float:
        """Return Unix seconds."""
        return self.wall_s

    def monotonic_s(self) -> float:
        """Return seconds since some moment."""
        return self.steady_s


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long things take, and the settings of detection that go with it.

    ``whole`` has a site's defaults and the lengths of the claim; ``quick`` shorter ones, and floors in proportion.
    """

    settings: DetectionSettings
    nodes: int
    calm_s: int  # before and after
    away_s: int  # an agent's restart, the server's absence
    network_s: int
    storage_s: int
    start_s: int
    checkpoint_s: int
    lone_s: tuple[int, ...]  # pauses of one rank, one after the other


WHOLE = Pace(
    settings=DetectionSettings(), nodes=8, calm_s=180,
    away_s=20, network_s=60, storage_s=600, start_s=1200, checkpoint_s=1200, lone_s=(30, 120, 600),
)  # fmt: skip
QUICK = Pace(
    settings=DetectionSettings(
        silent_floor_s=5, silent_alone_s=15, rank_silent_floor_s=5, hang_floor_s=8, straggler_floor_s=10,
        straggler_ripe_s=20, start_deadline_s=150, window_s=300,
    ),
    nodes=4, calm_s=30, away_s=8, network_s=25, storage_s=80, start_s=100, checkpoint_s=100, lone_s=(12, 30, 60),
)  # fmt: skip


@dataclass
class Host:
    """One node as its agent shows it. ``silent`` agents send nothing; with ``spools`` they send it later."""

    name: str
    silent: bool = False
    spools: bool = True
    stream: int = 1
    sequence: int = 0
    offset_s: float = 0.0  # of its clock, as far as the server does not know it
    rank_silent_s: float = 0.0
    row: dict[str, float] = field(default_factory=dict)  # what its node row shows instead
    gpu: dict[str, float] = field(default_factory=dict)  # what its GPU shows instead
    cpus: float | None = None  # that its rank's process uses; None: its agent does not say
    cpu_s: float = 0.0
    behind: float = 0.0  # collectives that its rank has not entered
    spool: list[Frame] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


class World:
    """A synchronous job on all nodes, one rank each; in each second of ``run`` a frame of each node and a tick."""

    def __init__(self, folder: Path, pace: Pace) -> None:
        self.pace = pace
        self.store = open_file(folder / "records.db")
        self.clocks = Clocks()
        self.watch = self._watch()
        self.hosts = {f"n{number}": Host(f"n{number}") for number in range(pace.nodes)}
        self.attempt = 0
        self.step: float | None = 0.0  # None: no rank has made one yet
        self.stepping = True
        self.waiting = False  # in a collective
        self.alive = True  # the job's processes exist
        self.data_wait_s = 0.05
        self.neighbours: tuple[str, ...] = ()  # nodes on which another job has a rank
        self.scheduler: dict[str, str] = {}  # what it says of each job; empty: there is none
        self.heard_every_s = 10
        self._sent: list[tuple[Frame, float]] = []
        self._up = True
        self._seconds = 0

    def declare(self, state: str = "running") -> None:
        """The launcher says who runs where, and that it restarts the job itself if asked."""
        ranks = [MemberRank(rank, node, 0) for rank, node in enumerate(self.hosts)]
        job = Job(
            job=JOB, attempt=self.attempt, state=state, ranks=ranks, restart_owner="eagle-eye",
            updated_s=self.clocks.now_s(), declared_state=state, since_s=self.clocks.now_s(),
        )  # fmt: skip
        self._record(job)

    def schedule(self, job: str, state: str) -> None:
        """From now on the scheduler says this of the job whenever it is asked."""
        self.scheduler[job] = state

    def run(self, seconds: int) -> None:
        """Let time pass."""
        for _ in range(seconds):
            self._seconds += 1
            self.clocks.wall_s += 1.0
            self.clocks.steady_s += 1.0
            if self.stepping and self.alive and self.step is not None:
                self.step += 1.0 / STEP_S
            for rank, host in enumerate(self.hosts.values()):
                self._send(rank, host)
            if self._up:
                if self.scheduler and self._seconds % self.heard_every_s == 0:
                    self.ask_scheduler()
                self.watch.tick(self.clocks.now_s())

    def ask_scheduler(self) -> None:
        """The scheduler is asked now and answers."""
        now_s = self.clocks.now_s()
        for name, state in self.scheduler.items():
            known = self.store.get(JOBS, name) or Job(
                job=name, attempt=0, state=state, ranks=[], restart_owner="", updated_s=now_s, source="slurm",
                nodes=list(self.neighbours), since_s=now_s,
            )  # fmt: skip
            told = msgspec.structs.replace(
                known, state=agreed_state(known.declared_state, state), scheduled_state=state,
                scheduled_as=f"slurm:{name}", updated_s=now_s,
            )  # fmt: skip
            self._record(told)
        self.watch.observe_scheduler(SchedulerReports("slurm", now_s, frozenset(self.scheduler)))

    def happens(self, node: str, kind: str, **attributes: Any) -> None:
        """An event that the node's next frame carries."""
        self.hosts[node].events.append(Event(self.clocks.now_s(), kind, 0, attributes))

    def phase(self, node: str, name: str) -> None:
        """The rank of the node enters a phase."""
        rank = list(self.hosts).index(node)
        self.happens(node, "phase", name=name, rank=rank, job=JOB, attempt=self.attempt)

    def ranks_die(self, exit_code: int, job: str = JOB) -> None:
        """All ranks of the job are gone."""
        for rank, node in enumerate(self.hosts):
            if job == JOB or node in self.neighbours:
                self.happens(
                    node, "process_exit",
                    exit_code=exit_code, rank=rank, pid=100 + rank, goodbye=False, job=job, attempt=self.attempt,
                )  # fmt: skip
        if job == JOB:
            self.alive = False
        else:
            self.neighbours = ()

    def agent_stops(self, node: str, *, goodbye: bool) -> None:
        """The node's agent is gone; a killed one says nothing before."""
        host = self.hosts[node]
        if goodbye:
            self.happens(node, "agent_stop", reason="signal 15")
            self._send(list(self.hosts).index(node), host)
        host.silent, host.spools = True, False

    def agent_starts(self, node: str) -> None:
        """A new agent speaks for the node."""
        host = self.hosts[node]
        host.silent, host.spools = False, True
        host.stream += 1
        host.sequence = 0
        self.happens(node, "agent_start", version="0.2")

    def server_dies(self) -> None:
        """Nobody takes frames; agents keep them."""
        self._up = False

    def server_starts(self) -> None:
        """A server begins with what the store and the history of the last quarter of an hour hold."""
        self._up = True
        self.watch = self._watch()
        self.watch.recover((frame, at_s) for frame, at_s in self._sent if at_s > self.clocks.now_s() - 900.0)

    def close(self) -> None:
        """The store is closed."""
        self.store.close()

    def actions(self) -> list[str]:
        """Return everything that was asked of anybody."""
        return [f"{a.kind} {','.join(a.exclude)} ({a.fault}, {a.state})" for a in self.store.all(ACTIONS)]

    def notices(self) -> list[str]:
        """Return what people were notified of."""
        return sorted({f"{i.fault} {i.node or ''}".strip() for i in self.store.all(INCIDENTS)})

    def out(self) -> dict[str, tuple[str, str]]:
        """Return the nodes that are not in service: state and on whose word."""
        return {n.node: (n.state, n.by) for n in self.store.all(NODES) if n.state != "in_service"}

    def _watch(self) -> DetectionLoop:
        engine = Engine(self.pace.settings, watching_since_s=self.clocks.now_s())
        return DetectionLoop(engine, self.store, self.clocks, PolicySettings(mode="act"), "http://eagle-eye:8470")

    def _record(self, job: Job) -> None:
        self.store.commit(Change(jobs=(job,)))
        self.watch.observe_job(job)

    def _send(self, rank: int, host: Host) -> None:
        if host.silent and not host.spools:
            host.events.clear()
            return
        host.sequence += 1
        host.spool.append(self._frame(rank, host))
        if host.silent or not self._up:
            return
        for frame in host.spool:
            self._sent.append((frame, self.clocks.now_s()))
            self.watch.observe(frame, self.clocks.now_s(), 0.0)
        host.spool = []

    def _frame(self, rank: int, host: Host) -> Frame:
        dying = any(event.kind == "process_exit" for event in host.events)  # whom the last words are about
        row: dict[str, float] = {"gpu_utilization_ratio": 0.9 if self.stepping and self.alive else 0.02}
        ranks = []
        if self.alive or dying:
            ranks.append(Rank(JOB, rank, len(self.hosts), 0, self.attempt, 100 + rank, "", host.rank_silent_s))
        if self.alive and host.cpus is not None:
            host.cpu_s += host.cpus
            row |= {"rank_cpu_seconds_total": host.cpu_s, "rank_io_bytes_total": 0.0, "rank_blocked_ratio": 0.0}
        row |= host.gpu
        if self.alive and self.step is not None:
            step = float(int(self.step))
            done = step * COLLECTIVES_PER_STEP
            row |= {
                "train_step": step, "train_step_seconds": STEP_S, "train_compute_seconds": 1.2,
                "train_data_wait_seconds": self.data_wait_s, "nccl_collective_seconds": 0.7,
                "nccl_sequence": done + (1.0 if self.waiting else 0.0) - host.behind,
                "nccl_completed_sequence": done, "train_loss": 2.0, "train_local_grad_norm": 1.0,
            }  # fmt: skip
        if host.name in self.neighbours:
            ranks.append(Rank(NEIGHBOUR, rank, len(self.neighbours), 1, 0, 500 + rank))
        node = {
            "node_cpu_utilization_ratio": 0.3, "node_iowait_ratio": 0.01, "node_io_pressure_ratio": 0.02,
            "node_blocked_tasks": 0.0, "node_disk_read_bytes_per_second": 2e7,
            "node_disk_write_bytes_per_second": 1e6, **host.row,
        }  # fmt: skip
        events, host.events = host.events, []
        return Frame(
            version=WIRE_VERSION, node=host.name, boot_id="b", stream=f"{host.name}-{host.stream}",
            sequence=host.sequence, time_s=self.clocks.now_s() + host.offset_s, interval_s=1.0, agent_version="0.1",
            ranks=ranks, blocks=[block(Scope.DEVICE, {0: row}), block(Scope.NODE, {-1: node})], events=events,
        )  # fmt: skip
