from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagle_eye.agent.assembly import Assembly
from eagle_eye.agent.clock import Wake
from eagle_eye.agent.collector import Drops
from eagle_eye.agent.config import AgentConfiguration
from eagle_eye.agent.loop import Loop, LoopSettings, LoopSources
from eagle_eye.agent.processes.process_registry import TrainingProcesses
from tests.agent.fakes import FakeClock

WARM_FRAMES = 200
FRAMES = 1_000
GROWTH_BYTES_MAX = 64 << 10  # 64 bytes a tick, 5 MB a day


class Growth:
    """A sink that ends the loop after FRAMES, and knows what Python held when it was warm and at the end."""

    def __init__(self) -> None:
        self.frames = 0
        self.warm_bytes = self.end_bytes = 0
        self.stop: Callable[[], None] = lambda: None

    def append(self, make: Callable[[str, int], bytes]) -> int | None:
        make("stream", self.frames + 1)
        self.frames += 1
        if self.frames == WARM_FRAMES:
            self.warm_bytes, _ = tracemalloc.get_traced_memory()
        elif self.frames == WARM_FRAMES + FRAMES:
            self.end_bytes, _ = tracemalloc.get_traced_memory()
            self.stop()
        return self.frames


@pytest.fixture
def assembly(tmp_path: Path) -> Iterator[Assembly]:
    configuration = AgentConfiguration(node="n1", hook_socket=str(tmp_path / "hook.sock"))
    assembly = Assembly(configuration, Drops(), FakeClock(), lambda: None, tmp_path, TrainingProcesses())
    yield assembly
    assembly.close()


def test_a_thousand_ticks_of_every_collector_leave_nothing_behind(assembly: Assembly) -> None:
    growth, wake = Growth(), Wake()
    sources = LoopSources(assembly.runners, assembly.happened, wake)
    loop = Loop(LoopSettings("n1"), sources, growth, Drops(), FakeClock())
    growth.stop = lambda: loop.stop("SIGTERM")
    tracemalloc.start()
    try:
        loop.run()
    finally:
        tracemalloc.stop()
    assert growth.end_bytes - growth.warm_bytes < GROWTH_BYTES_MAX
