"""A story told in frames: a synchronous job on a few nodes, driven through the engine on a fake clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle_eye.schema.action import MemberRank, ReportedExit
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import WIRE_VERSION, Frame, Rank, block
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.engine.engine import Engine
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.settings import DetectionSettings
from eagle_eye.server.model.records import Job

START_S = 1_000_000.0
SETTINGS = DetectionSettings(
    silent_floor_s=5,
    silent_alone_s=15,
    rank_silent_floor_s=5,
    hang_floor_s=8,
    straggler_floor_s=10,
    crash_settle_s=1,
    start_deadline_s=120,
)


class Fleet:
    """Nodes n0..nN-1 of one job, one rank each, one step and one frame a second."""

    def __init__(self, nodes: int = 3, settings: DetectionSettings = SETTINGS) -> None:
        self.now_s = START_S
        self.engine = Engine(settings, watching_since_s=START_S)
        self.nodes = [f"n{i}" for i in range(nodes)]
        self.job = "j"
        self.attempt = 0
        self.step = 0.0
        self.stopped = False  # the job makes no step
        self.mute: set[str] = set()  # nodes that send nothing
        self.silent_s: dict[str, float] = {}
        self.compute_s: dict[str, float] = {}
        self.loss = 2.0
        self.local_norm: dict[str, float] = {}
        self.node_rows: dict[str, dict[str, float]] = {}  # what nodes tell besides
        self.events: list[tuple[str, Event]] = []
        self._sequence = 0

    def frame(self, node: str) -> Frame:
        """Return the node's next frame."""
        self._sequence += 1
        rank = self.nodes.index(node)
        compute_s = self.compute_s.get(node, 0.5)
        row = {
            "train_step": self.step,
            "train_step_seconds": 1.0,
            "train_compute_seconds": compute_s,
            "nccl_collective_seconds": 1.0 - compute_s,
            "nccl_sequence": self.step + (1 if self.stopped else 0),
            "nccl_completed_sequence": self.step,
            "train_loss": self.loss,
            "train_local_grad_norm": self.local_norm.get(node, 1.0),
        }
        whole_node = {"node_cpu_utilization_ratio": 0.5} | self.node_rows.get(node, {})
        events = [event for owner, event in self.events if owner == node]
        self.events = [(owner, event) for owner, event in self.events if owner != node]
        return Frame(
            version=WIRE_VERSION,
            node=node,
            boot_id="b",
            stream="s",
            sequence=self._sequence,
            time_s=self.now_s,
            interval_s=1.0,
            agent_version="0",
            ranks=[
                Rank(self.job, rank, len(self.nodes), 0, self.attempt, 100 + rank, "", self.silent_s.get(node, 0.0))
            ],
            blocks=[block(Scope.DEVICE, {0: row}), block(Scope.NODE, {-1: whole_node})],
            events=events,
        )

    def happens(self, node: str, kind: str, **attributes: Any) -> None:
        """An event that the node's next frame carries."""
        self.events.append((node, Event(self.now_s, kind, 0, attributes)))

    def declare(
        self,
        attempt: int,
        state: str = "running",
        nodes: list[str] | None = None,
        held_up_by: Sequence[int] = (),
        pace_left_ratio: float | None = None,
        exits: Sequence[ReportedExit] = (),
    ) -> None:
        """The launcher says who runs where."""
        if nodes is not None:
            self.nodes = nodes
        self.attempt = attempt
        ranks = [MemberRank(i, node, 0) for i, node in enumerate(self.nodes)]
        job = Job(
            job=self.job,
            attempt=attempt,
            state=state,
            ranks=ranks,
            restart_owner="",
            updated_s=self.now_s,
            held_up_by=list(held_up_by),
            pace_left_ratio=pace_left_ratio,
            exits=list(exits),
        )
        self.engine.observe_job(job)

    def run(self, seconds: int) -> list[Judgement]:
        """Let time pass, one frame of each node and one tick a second; return the judgements."""
        judged: list[Judgement] = []
        for _ in range(seconds):
            self.now_s += 1.0
            self.step += 0.0 if self.stopped else 1.0
            for node in self.nodes:
                if node not in self.mute:
                    self.engine.observe(self.frame(node), self.now_s)
            judged += self.engine.tick(self.now_s)
        return judged
