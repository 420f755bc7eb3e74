"""A node whose ranks write flight-recorder dumps, as PyTorch would."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

from eagle_eye.agent.collector import Drops, Observed
from eagle_eye.agent.collectors.flight_recorder import FlightRecorderCollector
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses
from tests.agent.fakes import FakeClock
from tests.agent.nccl_fakes import FakeProc, flight_dump, flight_entry

ON = {"TORCH_FR_DUMP_TEMP_FILE": "trace_", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "pipe_"}
DUMP = flight_dump(flight_entry(6), flight_entry(7, "started"))


class Node:
    """A node whose ranks may write dumps; its clock reads what files' times say."""

    def __init__(self, tmp_path: Path, clock: FakeClock) -> None:
        self.clock = clock
        self.proc = FakeProc(tmp_path)
        self.processes = TrainingProcesses()
        self.drops = Drops()
        self.writes_done = 0

    def agent(self, *prefixes: str) -> FlightRecorderCollector:
        return FlightRecorderCollector(
            self.processes, self.drops, prefixes, proc=self.proc.path, monotonic_s=self.clock.monotonic_s
        )

    def runs(self, *processes: TrainingProcess, environ: dict[str, str] | None = None) -> None:
        for one in processes:
            self.proc.runs(one.pid, ON if environ is None else environ)
        self.processes.publish(processes)

    def writes(self, dump: Any = DUMP, rank: int = 0, ago_s: float = 0.0, raw: bytes | None = None) -> Path:
        path = self.proc.folder / f"trace_{rank}"
        path.write_bytes(pickle.dumps(dump, protocol=2) if raw is None else raw)
        self.writes_done += 1  # so that each writing has a time of its own
        at_ns = int((self.clock.now_s() - ago_s) * 1e9) + self.writes_done
        os.utime(path, ns=(at_ns, at_ns))
        return path

    def collects(self, agent: FlightRecorderCollector) -> Observed:
        self.clock.advance(1.0)
        return agent.collect(self.clock.now_s())
