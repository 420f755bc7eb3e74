"""Traces through a server that listens: what it says of them, whichever way their samples come, across a kill.

Half of a trace is sent second by second, and judged in between on a clock that goes with it. Then the server's files
are copied as a kill would leave them, and a server that opens the copy gets the rest. Ways: whole frames, rows,
exporters' series by remote write (as far as one series makes a metric), and ``eagle-eye replay`` on the real clock.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import numpy as np
import pytest

from eagle_eye.schema.frame import Frame
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.rows import (
    CONTENT_TYPE,
    encode_row,
    encode_rows_request,
    encode_template,
    template_id,
    template_of,
)
from eagle_eye.server.backtest.trace import Step, Trace
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.engine.engine import Engine
from eagle_eye.server.ingest.remote_write.mapping import load
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.records import Job
from eagle_eye.server.monitor.detection_loop import DetectionLoop
from eagle_eye.server.store.store import Store
from tests.server.builders import FakeClock, Running, body, running
from tests.server.own_process import serving
from tests.server.remote_write.requests import V1_HEADERS, Written, series, snappy, v1

AFTER_S = 30  # judged after the last row
REPLAY_SPEED = 20.0
WAYS = ("frames", "rows", "remote_write", "replay")


class SteppedLoop(DetectionLoop):
    """Judges when told to, on the server's own event loop."""

    async def run(self) -> None:
        self.loop = asyncio.get_running_loop()
        await asyncio.Event().wait()

    def judge(self, now_s: float) -> None:
        """Judge all jobs at a time, from another thread; return once it is on record."""
        done = threading.Event()

        def turn() -> None:
            try:
                self.tick(now_s)
            finally:
                done.set()

        self.loop.call_soon_threadsafe(turn)
        assert done.wait(60.0)


class Served:
    """A server, its clock, and what has been sent to it so far."""

    def __init__(self, way: str, start_s: float) -> None:
        self.clock = FakeClock(start_s)
        self._way = way
        self._sequences: Counter[str] = Counter()
        self._loop: SteppedLoop | None = None

    def watching(self, config: ServerConfig, store: Store, clock: Clock) -> SteppedLoop:
        """Return the detection loop of a server."""
        engine = Engine(config.detection, watching_since_s=clock.now_s())
        self._loop = SteppedLoop(engine, store, clock, config.policy, config.public_url, None)
        return self._loop

    def send_second(self, server: Running, steps: list[Step]) -> None:
        """Send what happened within a second, and judge."""
        assert self._loop is not None
        for step in steps:
            if step.job is not None:
                declare(server.client, step.job)
        frames = [self._numbered(step.frame) for step in steps if step.frame is not None]
        for _, of_node in groupby(sorted(frames, key=lambda frame: frame.node), key=lambda frame: frame.node):
            getattr(self, f"_send_{self._way}")(server, list(of_node))
        self._loop.judge(self.clock.time_s)

    def _numbered(self, frame: Frame) -> Frame:
        self._sequences[frame.node] += 1
        stream = f"stream-{frame.node}"
        return msgspec.structs.replace(frame, stream=stream, boot_id=stream, sequence=self._sequences[frame.node])

    def _send_frames(self, server: Running, frames: list[Frame]) -> None:
        server.send(body(*frames, sent_s=self.clock.time_s)).raise_for_status()

    def _send_rows(self, server: Running, frames: list[Frame]) -> None:
        templates: dict[bytes, None] = {}
        rows: list[bytes] = []
        for frame in frames:
            template = template_of(frame)
            raw = encode_template(template)
            templates[raw] = None
            rows.append(encode_row(frame, template, template_id(raw)))
        content = encode_rows_request(list(templates), rows, self.clock.time_s)
        server.client.post("/api/v1/frames", content=content, headers={"content-type": CONTENT_TYPE}).raise_for_status()

    def _send_remote_write(self, server: Running, frames: list[Frame]) -> None:
        written = [one for frame in frames for one in series_of(frame)]
        if written:
            content = snappy(v1(*written))
            server.client.post("/api/v1/write", content=content, headers=V1_HEADERS).raise_for_status()


def series_of(frame: Frame) -> Iterator[Written]:
    """Yield the series of exporters that make the frame's metrics."""
    for block in frame.blocks:
        if block.scope not in (Scope.DEVICE, Scope.NODE):
            continue
        values = np.frombuffer(block.values, "<f8").reshape(len(block.keys), len(block.metrics))
        for key, row in zip(block.keys, values, strict=True):
            for metric, value in zip(block.metrics, row, strict=True):
                origin = ORIGINS.get(metric)
                if origin is None or np.isnan(value):
                    continue
                name, device, factor = origin
                where = {"instance": f"{frame.node}:9400", "Hostname": frame.node, "eagle_eye_job": "job"}
                labels = {**where, "job": "exporter"} | ({device: str(key)} if device else {})
                yield series(name, float(value) / factor, frame.time_s, **labels)


def _origins() -> Mapping[str, tuple[str, str, float]]:
    """Return for each metric that one series makes: the series, the label with the device, and the factor."""
    found: dict[str, tuple[str, str, float]] = {}
    for name, uses in load().metrics.items():
        for use in uses:
            rule, origin = use.rule, use.origin
            alone = origin is rule.origins[0] and (len(rule.origins) == 1 or rule.combine == "first")
            computed = rule.each or rule.per or rule.of or rule.complement or rule.equals or origin.rate or origin.over
            if alone and not (computed or origin.where or use.exporter.link):
                found.setdefault(rule.to, (name, use.exporter.device, origin.factor))
    return found


ORIGINS = _origins()


def declare(client: httpx.Client, job: Job) -> None:
    """Report the scheduler's word on a job."""
    ranks = [msgspec.to_builtins(rank) for rank in job.ranks]
    content = {"attempt": job.attempt, "state": job.state, "ranks": ranks}
    client.put(f"/api/v1/jobs/{quote(job.job, safe='')}", json=content).raise_for_status()


def stepped(folder: Path, way: str) -> list[str]:
    """Return what a server says of a trace that comes in the way, and that is killed in the middle."""
    trace = Trace(folder)
    start_s, end_s = int(trace.header.start), int(trace.header.end) + 1 + AFTER_S
    seconds: dict[int, list[Step]] = defaultdict(list)
    for second, steps in groupby(trace.steps(), key=lambda step: int(step.time_s) + 1):
        seconds[second].extend(steps)
    served = Served(way, float(start_s))
    middle_s = (start_s + end_s) // 2
    with tempfile.TemporaryDirectory() as place:
        before, after = Path(place) / "before", Path(place) / "after"
        options: dict[str, Any] = {"clock": served.clock, "watching": served.watching, "policy__mode": "act"}
        with running(before, **options) as server:
            for second in range(start_s, middle_s):
                served.clock.time_s = float(second)
                served.send_second(server, seconds.pop(second, []))
            shutil.copytree(before, after)
        with running(after, **options) as server:
            for second in range(middle_s, end_s):
                served.clock.time_s = float(second)
                served.send_second(server, seconds.pop(second, []))
            return said(server.client)


def replayed(folder: Path) -> list[str]:
    """Return what a server says of a trace that ``eagle-eye replay`` sends; it is killed meanwhile."""
    seconds = Trace(folder).header.end - Trace(folder).header.start
    with tempfile.TemporaryDirectory() as place:
        data, config = Path(place) / "data", Path(place) / "server.toml"
        config.write_text('[policy]\nmode = "act"\n')
        options = ("--config", str(config))
        with serving(data, *options) as server:
            listen = server.listen
            words = ["-m", "eagle_eye.cli.main", "replay", str(folder), "--server", f"http://{listen}"]
            sending = subprocess.Popen(
                [sys.executable, *words, "--speed", str(REPLAY_SPEED)], stdout=subprocess.DEVNULL
            )
            with pytest.raises(subprocess.TimeoutExpired):
                sending.wait(seconds / REPLAY_SPEED / 2.0)
        with serving(data, *options, "--listen", listen) as server:
            assert sending.wait(seconds) == 0
            return said(server.client)


def said(client: httpx.Client) -> list[str]:
    """Return the incidents and actions on record: faults, nodes, actions; ids and times left out."""
    incidents = client.get("/api/v1/incidents?limit=1000").raise_for_status().json()["items"]
    actions = client.get("/api/v1/actions?limit=1000").raise_for_status().json()["items"]
    fault_of = {one["id"]: one["fault"] for one in incidents}
    lines = [json.dumps([one["fault"], one["nodes"], one["action"]]) for one in incidents]
    lines += [json.dumps([fault_of.get(one["incident_id"]), one["kind"], one["exclude"]]) for one in actions]
    return sorted(lines)


def lived(make: Callable[[Path], None], way: str) -> list[str]:
    """Return what a server says of a trace that comes in the way."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        make(trace)
        return replayed(trace) if way == "replay" else stepped(trace, way)
