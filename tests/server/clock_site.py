"""A job whose nodes' clocks are set while it runs: its frames as the server places them, through the engine."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from eagle_eye.schema.frame import Frame, block
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.ingest import fleet as server_fleet
from tests.server.engine.frames import Fleet

STEPPED = "n1"


class Site(Fleet):
    """Nodes under load, one GPU each; the clock of one is ahead by ``ahead_s``, and ``says`` so or not."""

    def __init__(self, says: bool, nodes: int = 4) -> None:
        super().__init__(nodes)
        self.says = says
        self.ahead_s = 0.0
        self.throttled = False  # the stepped node's GPU
        self.known = server_fleet.Fleet(nodes)
        self.placed_s: list[float] = []  # how far from its moment each frame of the stepped node was placed

    def at(self, stop_s: int, change: Callable[[], None]) -> list[Judgement]:
        """Let time pass until so many seconds have; then something changes."""
        judged = self.run(stop_s)
        change()
        return judged

    def set_clock(self, ahead_s: float) -> Callable[[], None]:
        """Return what sets the clock."""

        def change() -> None:
            self.ahead_s = ahead_s

        return change

    def frame(self, node: str) -> Frame:
        """Return the node's next frame as the engine gets it."""
        plain = self._loaded(super().frame(node), node)
        ahead_s = self.ahead_s if node == STEPPED else 0.0
        events = [replace(event, time_s=event.time_s + ahead_s) for event in plain.events]
        sent = replace(plain, time_s=plain.time_s + ahead_s, events=events)
        base_s = ahead_s - 500.0 if self.says else None
        received_s = self.now_s + 0.05
        offset_s = self.known.offset_s(node, sent.time_s + 0.04, received_s, sent.time_s, base_s)
        (moved_s,) = self.known.moved_s(node, [sent.time_s], received_s) or [0.0]
        self.known.heard(sent, received_s, moved_s)
        dated = self.known.dated(sent, offset_s + moved_s, received_s)
        if node == STEPPED:
            self.placed_s.append(dated.time_s - self.now_s)
        return dated

    def _loaded(self, plain: Frame, node: str) -> Frame:
        low = 0.7 if self.throttled and node == STEPPED else 1.0
        row = {
            "gpu_sm_clock_hertz": 1.98e9 * low,
            "gpu_memory_clock_hertz": 2.6e9,
            "gpu_power_watts": 650.0 * low,
            "gpu_power_limit_watts": 700.0,
            "gpu_temperature_celsius": 60.0,
            "gpu_throttle_reasons": 0.0 if low == 1.0 else 136.0,
            "gpu_utilization_ratio": 1.0,
        }
        (devices, nodes) = plain.blocks
        rank_row = dict(zip(devices.metrics, memoryview(devices.values).cast("d"), strict=True))
        return replace(plain, blocks=[block(Scope.DEVICE, {0: {**rank_row, **row}}), nodes])
