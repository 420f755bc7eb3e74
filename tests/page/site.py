"""Servers for a browser to look at: one that has watched a simulated fault, one with a fleet of any size."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from eagle_eye.schema.frame import Frame, encode_frame, encode_request
from eagle_eye.server.backtest.trace import Trace
from eagle_eye.server.model.records import Node
from eagle_eye.server.monitor.detection_loop import DetectionLoop
from eagle_eye.server.monitor.watcher import JobProgress
from eagle_eye.server.store.store import Change
from eagle_eye.simulator.scenario import Scenario
from eagle_eye.simulator.simulate import simulate
from eagle_eye.simulator.writer import write
from tests.server.builders import Running, frame, running

if TYPE_CHECKING:
    from playwright.sync_api import Page

TICK_S = 5.0  # of the trace: how often it is judged
SMALL: dict[str, Any] = {"nodes": 6, "gpus": 4, "minutes": 5.0, "interval_s": 2.0, "seed": 7, "habits": False}


@dataclass
class LaggingClock:
    """The system's clock, behind by ``lag_s``: a browser has no other. Or one that stands still at ``stopped_s``."""

    lag_s: float = 0.0
    stopped_s: float | None = None

    def now_s(self) -> float:
        return time.time() - self.lag_s if self.stopped_s is None else self.stopped_s

    def monotonic_s(self) -> float:
        return self.now_s()


@contextmanager
def replayed(folder: Path, fault: str, port: int = 0, **changes: Any) -> Iterator[Running]:
    """Run a server that has just watched a simulated job with the fault, up to now, with its real detection loop.

    ``changes`` are the scenario's fields; those with two underscores in them, the configuration's.
    """
    scenario = {name: value for name, value in changes.items() if "__" not in name}
    flags = {name: value for name, value in changes.items() if "__" in name}
    write(simulate(Scenario(**(SMALL | {"fault": fault} | scenario))), folder / "trace")
    trace = Trace(folder / "trace")
    start, end = trace.header.start, trace.header.end
    # Between the looks it stands still: on a busy machine sending takes longer than what is sent.
    begun_s = time.time() - (end - start)
    clock = LaggingClock(stopped_s=begun_s)
    shift_s = begun_s - start
    # A pause of four ticks would be a time in which nobody watched.
    flags = {"detection__tick_s": TICK_S / 2, **flags}
    with running(folder / "data", clock, port=port, judging=True, **flags) as server:
        waiting: list[Frame] = []
        ticks = 1
        for step in trace.steps():
            while step.time_s >= start + ticks * TICK_S:
                _send(server, clock, waiting)
                clock.stopped_s = begun_s + ticks * TICK_S
                _judge(server, clock)
                ticks += 1
            if step.frame is not None:
                waiting.append(_shifted(step.frame, shift_s))
        _send(server, clock, waiting)
        clock.stopped_s = begun_s + end - start
        _judge(server, clock)
        clock.lag_s, clock.stopped_s = time.time() - clock.stopped_s, None
        yield server


def _send(server: Running, clock: LaggingClock, frames: list[Frame]) -> None:
    """Send the frames as their agents would: each node its own, all at once."""
    by_node: dict[str, list[bytes]] = defaultdict(list)
    for one in frames:
        by_node[one.node].append(encode_frame(one))
    frames.clear()
    with ThreadPoolExecutor(8) as agents:
        bodies = [encode_request(mine, clock.now_s()) for mine in by_node.values()]
        for answer in agents.map(server.send, bodies):
            assert answer.status_code == 200, answer.text


def _judge(server: Running, clock: LaggingClock) -> None:
    watch = server.dispatcher.services.watcher
    assert isinstance(watch, DetectionLoop)
    loop = server.dispatcher.services.signal._loop
    assert loop is not None

    async def tick() -> None:
        watch.tick(clock.now_s())

    asyncio.run_coroutine_threadsafe(tick(), loop).result(10.0)


def _shifted(one: Frame, by_s: float) -> Frame:
    events = [replace(event, time_s=event.time_s + by_s) for event in one.events]
    return replace(one, time_s=one.time_s + by_s, events=events)


def until(page: Page, claim: str, within_s: float = 15.0) -> None:
    """Wait until the JavaScript says true. The page's policy forbids the evaluation that wait_for_function needs."""
    deadline_s = time.monotonic() + within_s
    while not page.evaluate(claim):
        assert time.monotonic() < deadline_s, claim
        time.sleep(0.02)


def fleet_of(server: Running, nodes: int, job_nodes: int = 128) -> None:
    """Give the server so many nodes in jobs of ``job_nodes``, all of them heard just now."""
    services = server.dispatcher.services
    now_s = services.clock.now_s()
    names = [f"gpu{at // 100:03d}-{at % 100:02d}" for at in range(nodes)]
    services.store.commit(
        Change(nodes=tuple(Node(node=name, state="in_service", reason="", updated_s=now_s) for name in names))
    )
    for name in names:
        services.fleet.heard(frame(node=name, time_s=now_s), now_s)
    server.watcher.course = [
        JobProgress(
            job=f"llm-{first // job_nodes:03d}",
            attempt=0,
            state="running",
            declared=True,
            started_s=now_s - 7200.0,
            first_step=1.0,
            step=4000.0,
            progressed_s=now_s - 1.0,
            step_s=1.8,
            nodes=tuple(names[first : first + job_nodes]),
            gpus=8 * job_nodes,
            heard=len(names[first : first + job_nodes]),
            metrics=frozenset({"gpu_power_watts", "train_step"}),
        )
        for first in range(0, nodes, job_nodes)
    ]
