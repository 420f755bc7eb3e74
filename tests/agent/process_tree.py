"""A /proc of processes that do not exist, a watcher that ends them, and a collector that looks at them."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from eagle_eye.agent.collector import Drops, Observed
from eagle_eye.agent.collectors.processes import (
    LOOK_S,
    SETTLE_WITH_GPUS_S,
    GpuDriver,
    HookedProcesses,
    ProcessesCollector,
    ProcessHost,
)
from eagle_eye.agent.processes.exit_watcher import Ended
from eagle_eye.agent.processes.process_registry import TrainingProcesses
from eagle_eye.schema.frame import WIRE_VERSION, Frame, decode_frame, encode_frame
from tests.agent.fakes import FakeClock

TORCH = "7f00 r-xp 00000000 08:01 1 /usr/lib/python3/site-packages/torch/lib/libtorch_cpu.so\n"


def rank(number: int = 0, of: int = 2, **more: str) -> dict[str, str]:
    """The environment that torchrun gives a rank of job "llm"."""
    places = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(of)}
    return {**places, "TORCHELASTIC_RUN_ID": "llm", "TORCHELASTIC_RESTART_COUNT": "0", **more}


class ProcessTree:
    """Processes below ``root``; those that another user owns cannot be read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ticks = 1_000
        self.watcher = FakeWatcher(self)
        root.mkdir()
        self.starts(1)

    def starts(
        self,
        pid: int,
        environ: Mapping[str, str] | bytes = b"",
        *,
        parent: int = 1,
        torch: bool = False,
        arguments: str = "python train.py",
        cgroup: str = "0::/\n",
    ) -> None:
        """A new process, or another one with the id of one that ended."""
        self.ticks += 1
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        if not isinstance(environ, bytes):
            environ = b"".join(f"{name}={value}\0".encode() for name, value in environ.items())
        (folder / "environ").write_bytes(environ)
        (folder / "stat").write_text(f"{pid} (py) thon) S {parent} " + "0 " * 17 + f"{self.ticks} " + "0 " * 30)
        (folder / "maps").write_text("5500 r-xp 0 08:01 1 /usr/bin/python3\n" + (TORCH if torch else ""))
        (folder / "cmdline").write_bytes(arguments.replace(" ", "\0").encode())
        (folder / "cgroup").write_text(cgroup)

    def becomes_zombie(self, pid: int) -> None:
        stat = self.root / str(pid) / "stat"
        stat.write_text(stat.read_text().replace(") S ", ") Z "))

    def works(self, pid: int, *, cpu_s: float, io_bytes: int, state: str = "S") -> None:
        """The process has used so much processor time, read and written so many bytes."""
        folder = self.root / str(pid)
        before, _, fields = (folder / "stat").read_text().rpartition(") ")
        reported = fields.split()
        ticks = round(cpu_s * os.sysconf("SC_CLK_TCK"))
        reported[0], reported[11], reported[12], reported[13] = state, str(ticks // 2), str(ticks - ticks // 2), "0"
        (folder / "stat").write_text(f"{before}) {' '.join(reported)}")
        (folder / "io").write_text(f"rchar: {io_bytes - 7}\nwchar: 7\nsyscr: 9\nread_bytes: 4096\n")

    def loads_torch(self, pid: int) -> None:
        (self.root / str(pid) / "maps").write_text(TORCH)

    def is_gone(self, pid: int) -> None:
        shutil.rmtree(self.root / str(pid))

    def ends(self, pid: int, code: int | None = 0) -> None:
        """The process ended and its parent knows."""
        self.is_gone(pid)
        self.watcher.tells(pid, code)


class FakeWatcher:
    """Tells of ends when a test says so."""

    def __init__(self, tree: ProcessTree) -> None:
        self.watched: set[int] = set()
        self._tree = tree
        self._ended: Ended = lambda pid, code: None

    def __call__(self, ended: Ended) -> FakeWatcher:
        self._ended = ended
        return self

    def watch(self, pid: int) -> None:
        if not (self._tree.root / str(pid)).exists():
            raise ProcessLookupError
        self.watched.add(pid)

    def forget(self, pid: int) -> None:
        self.watched.discard(pid)

    def poll(self) -> None:
        pass

    def close(self) -> None:
        self.watched.clear()

    def tells(self, pid: int, code: int | None) -> None:
        if pid in self.watched:
            self.watched.discard(pid)
            self._ended(pid, code)


class Node:
    """A host with a collector that looks at it."""

    def __init__(self, tree: ProcessTree, clock: FakeClock, *, shared_host: bool = False) -> None:
        self.tree, self.clock = tree, clock
        self.drops = Drops()
        self.processes = TrainingProcesses()
        self.on_gpu: dict[int, int] = {}
        self.hooked: set[int] = set()
        self.attempts: dict[int, int] = {}
        self.uuids: dict[str, int] = {}
        self.bus_ids: dict[str, int] = {}
        self.wakes = 0
        self.cpu_s: Iterator[float] = itertools.repeat(0.0)
        self.collector = ProcessesCollector(
            self.processes,
            self.drops,
            driver=GpuDriver(lambda: dict(self.on_gpu), self.uuids, self.bus_ids),
            hooks=HookedProcesses(lambda: set(self.hooked), lambda: dict(self.attempts)),
            node="node17",
            shared_host=shared_host,
            wake=self.wake,
            host=ProcessHost(
                proc=tree.root,
                monotonic_s=clock.monotonic_s,
                now_s=clock.now_s,
                cpu_s=lambda: next(self.cpu_s),
                watch=tree.watcher,
            ),
        )

    def wake(self) -> None:
        self.wakes += 1

    def look(self, after_s: float = LOOK_S) -> Observed:
        """Wait for the next look and return what it sees, as the server would have it."""
        self.clock.advance(after_s)
        seen = self.collector.collect(self.clock.now_s())
        frame = Frame(
            WIRE_VERSION, "n", "b", "s", 1, self.clock.now_s(), 1.0, "0", ranks=seen.ranks, events=seen.events
        )
        assert decode_frame(encode_frame(frame)).ranks == seen.ranks
        return seen

    def settled(self) -> Observed:
        """Return what is seen when processes without a GPU have lived long enough."""
        self.look()
        return self.look(SETTLE_WITH_GPUS_S + LOOK_S)

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes.all()]
