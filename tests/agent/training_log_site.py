"""One node with training processes that write logs, for the tests of what the agent makes of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from eagle_eye.agent.collector import Drops, Observed
from eagle_eye.agent.collectors.training_log import TrainingLogCollector
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses
from eagle_eye.agent.training_logs.followed_logs import Pattern
from eagle_eye.schema.events import BY_KIND, Event
from eagle_eye.schema.frame import WIRE_VERSION, Frame, block, decode_frame, encode_frame
from eagle_eye.schema.metrics import Scope
from tests.agent.fakes import FakeClock

HEADER = "Traceback (most recent call last):\n"
FRAME = '  File "train.py", line 3, in <module>\n    step()\n'


def iteration(step: int, loss: str = "4.0E+00", step_ms: float = 2_000.0) -> str:
    return (
        f" iteration {step:8d}/    9000 | elapsed time per iteration (ms): {step_ms:.1f} | lm loss: {loss} |"
        " grad norm: 1.5 | number of nan iterations:   0 |\n"
    )


class Site:
    """One node: its processes, their outputs as /proc shows them, its logs, and the agent's collector."""

    def __init__(self, tmp_path: Path, clock: FakeClock) -> None:
        self.clock = clock
        self.folder = tmp_path / "run"
        self.folder.mkdir()
        self.proc = tmp_path / "proc"
        self.proc.mkdir()
        self.drops = Drops()
        self.processes = TrainingProcesses()
        self.alive: set[int] = set()
        self.hooked: set[int] = set()
        self.listed: list[TrainingProcess] = []
        self.user = os.geteuid()  # whose processes they are

    def runs(self, *ranks: int, size: int = 8, job: str = "j", attempt: int = 0) -> None:
        self.listed = [
            TrainingProcess(1_000 * (attempt + 1) + rank, job, rank, size, rank % 8, rank % 8, attempt)
            for rank in ranks
        ]
        self.alive = {process.pid for process in self.listed}
        self.processes.publish(self.listed)

    def ends(self) -> None:
        self.processes.publish([])
        self.alive.clear()
        shutil.rmtree(self.proc)
        self.proc.mkdir()

    def writes_to(self, rank: int, log: Path, number: int = 1) -> None:
        """Let the rank's output be this file."""
        pid = next(process.pid for process in self.listed if process.rank == rank)
        folder = self.proc / str(pid) / "fd"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(number)).symlink_to(log)
        (folder.parent / "status").write_text(f"Name:\tpython\nUid:\t{self.user}\t0\t0\t0\n")

    def log(self, name: str = "train.log", text: str = "") -> Path:
        log = self.folder / name
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(text)
        os.utime(log, (self.clock.now_s(), self.clock.now_s()))
        return log

    def agent(self, *patterns: str) -> TrainingLogCollector:
        return TrainingLogCollector(
            self.processes,
            self.drops,
            [Pattern(f"{self.folder}/{text}", "n1") for text in patterns],
            lambda: self.hooked,
            proc=self.proc,
            monotonic_s=self.clock.monotonic_s,
            running=lambda pid: pid in self.alive,
        )

    def collect(self, agent: TrainingLogCollector, after_s: float = 1.0) -> Observed:
        self.clock.advance(after_s)
        now_s = self.clock.now_s()
        observed = agent.collect(now_s)
        for event in observed.events:
            assert set(event.attributes) == set(BY_KIND[event.kind].attributes)
        blocks = [block(Scope.DEVICE, observed.devices)] if observed.devices else []
        frame = Frame(WIRE_VERSION, "n", "b", "s", 1, now_s, 1.0, "1", blocks=blocks, events=observed.events)
        decode_frame(encode_frame(frame))
        return observed


def append(log: Path, text: str) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(text)


def kinds(events: list[Event]) -> list[str]:
    return [event.attributes["name"] if event.kind == "phase" else event.kind for event in events]
