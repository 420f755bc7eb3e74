"""A store as strict as Prometheus 2.42: a request is taken whole or not at all, and no series goes back in time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from eagle_eye.schema.frame import Frame, Rank, block, encode_frame
from eagle_eye.schema.metrics import METRICS, PROMETHEUS_PREFIX, Scope
from eagle_eye.server.history.embedded_history import HISTORY_FILE, HISTORY_FOLDER, EmbeddedHistory
from eagle_eye.server.history.remote_history import Access
from eagle_eye.server.history.remote_sender import Post, SegmentManifest, send
from eagle_eye.server.history.remote_store import Order, PositionFile, SenderReport
from eagle_eye.server.history.segment_tables import RAW_FOLDER
from eagle_eye.server.ingest.remote_write import wire
from tests.server.builders import NOW, frame
from tests.server.segments.kept import WITHIN_S, batch

URL = "http://store/api/v1/write"
WANTED = frozenset((PROMETHEUS_PREFIX + spec.name).encode() for spec in METRICS)

Key = tuple[tuple[str, str], ...]


class StrictStore:
    """Keeps samples by labels; ``before`` is asked first for each request and may answer or raise in its place."""

    def __init__(self) -> None:
        self.series: dict[Key, list[tuple[float, float]]] = {}
        self.requests = 0
        self.before: Callable[[int], httpx.Response | None] = lambda _number: None
        self.after: Callable[[int], None] = lambda _number: None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests += 1
        answer = self.before(self.requests)
        if answer is None:
            answer = self._take(request.content)
            self.after(self.requests)
        return answer

    def _take(self, body: bytes) -> httpx.Response:
        written = wire.read_v1(wire.uncompressed(body, wire.announced_bytes(body)), WANTED, 1_000_000)
        new: list[tuple[Key, float, float]] = []
        for one in written.series:
            key = tuple(sorted(wire.labels(one.key).items()))
            last = self.series.get(key, [(float("-inf"), 0.0)])[-1]
            for sample in one.samples:
                assert sample.value is not None
                reported = (sample.time_ms / 1000.0, sample.value)
                if reported[0] < last[0] or (reported[0] == last[0] and reported[1] != last[1]):
                    return httpx.Response(400, text="out of order sample\n")
                if reported != last:
                    new.append((key, *reported))
        for key, time_s, value in new:
            self.series.setdefault(key, []).append((time_s, value))
        return httpx.Response(204)

    def samples(self, metric: str, **labels: str) -> list[tuple[float, float]]:
        """Return the samples of the one series of a metric with these labels."""
        wanted = {("__name__", PROMETHEUS_PREFIX + metric), *labels.items()}
        [found] = [samples for key, samples in self.series.items() if wanted <= set(key)]
        return found


def order(**more: Any) -> Order:
    settings: dict[str, Any] = {
        "url": URL,
        "access": Access(),
        "external_labels": {},
        "metrics": ("*",),
        "interval_s": 0.0,
        "request_samples_max": 7,
        "timeout_s": 1.0,
    }
    return Order(**{**settings, **more})


def bring(folder: Path, store: StrictStore, **more: Any) -> list[SenderReport]:
    """Send what the history in a folder has, as the sender does, and return what it said."""
    said: list[SenderReport] = []
    asked = order(**more)
    manifest, file = SegmentManifest(folder / HISTORY_FILE), PositionFile(folder)
    try:
        with httpx.Client(transport=httpx.MockTransport(store)) as client:
            post = Post(client, asked.url, lambda _s: None, lambda *_: None)
            send(asked, folder / HISTORY_FOLDER / RAW_FOLDER, manifest, file, post, said.append)
    finally:
        manifest.close()
        file.close()
    return said


def second(at: int, node: str = "n1", begin_s: float = NOW) -> Frame:
    """Return a second of a node with two GPUs, a port, and a job that has one of the GPUs."""
    watts = {device: {"gpu_power_watts": 300.1 + at + device, "train_step": 2.0**40 + at} for device in range(2)}
    blocks = [
        block(Scope.DEVICE, watts),
        block(Scope.NODE, {-1: {"node_cpu_utilization_ratio": 0.83}}),
        block(Scope.LINK, {"mlx5_0": {"link_up": 1.0}}),
    ]
    ranks = [Rank("job", 0, 2, 1)]
    return frame(at + 1, node, begin_s + at, blocks=blocks, ranks=ranks, job=None)


def keep(history: EmbeddedHistory, *frames: Frame, late_s: float = 0.1) -> None:
    """Have the history take frames, each when it was due."""
    for one in frames:
        history.submit(batch([encode_frame(one)], one.time_s + late_s)).result(WITHIN_S)
