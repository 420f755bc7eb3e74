"""Builders of windows: a healthy synchronous job, which a test then spoils."""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle_eye.detectors.types import Happening, Pause, Series, Window

NOW_S = 1_000.0
INTERVAL_S = 1.0
ROWS = 60
STEP_S = 0.5


class Story:
    """A job of ``nodes`` nodes with ``gpus`` ranks each that makes two steps a row; methods spoil it."""

    def __init__(self, nodes: int = 4, gpus: int = 1, rows: int = ROWS) -> None:
        self.nodes = tuple(f"n{i}" for i in range(nodes))
        self.series = tuple(
            Series(node, device, i * gpus + device) for i, node in enumerate(self.nodes) for device in range(gpus)
        )
        count = len(self.series)
        self.times_s = NOW_S - INTERVAL_S * np.arange(rows - 1, -1, -1)
        noise = np.random.default_rng(0).normal(1.0, 0.02, (rows, count))
        steps = np.repeat(2.0 * np.arange(1, rows + 1)[:, None], count, axis=1)
        self.device: dict[str, Any] = {
            "train_step": steps,
            "train_step_seconds": np.full((rows, count), STEP_S),
            "train_compute_seconds": 0.3 * noise,
            "nccl_collective_seconds": 0.2 - 0.3 * (noise - 1.0),
            "nccl_sequence": 4 * steps,
            "nccl_completed_sequence": 4 * steps,
            "train_loss": np.full((rows, count), 2.0),
            "train_grad_norm": np.full((rows, count), 1.0),
            "train_local_grad_norm": np.full((rows, count), 1.5),
        }
        self.heard_s = np.full(nodes, NOW_S)
        self.farewell = np.zeros(nodes, dtype=np.bool_)
        self.silent_s = np.zeros(count)
        self.events: list[Happening] = []
        self.phase = [""] * count
        self.phase_since_s = np.full(count, -np.inf)
        self.pauses: list[Pause] = []
        self.watching_since_s = 0.0
        self.started_s = NOW_S - rows

    def column(self, node: str) -> list[int]:
        """Return the columns of a node."""
        return [i for i, series in enumerate(self.series) if series.node == node]

    def standstill(self, rows: int) -> Story:
        """No step finishes in the last ``rows`` rows; all ranks wait in the same next collective."""
        for name in ("train_step", "nccl_completed_sequence", "nccl_sequence"):
            self.device[name][-rows:] = self.device[name][-rows - 1]
        self.device["nccl_sequence"][-rows:] += 1
        return self

    def exit(self, node: str, code: int | None, before_s: float, error: str = "", goodbye: bool = False) -> Story:
        """A rank of the node ended ``before_s`` ago."""
        time_s = NOW_S - before_s
        rank = self.series[self.column(node)[0]].rank
        if error:
            self.events.append(Happening(time_s, node, 0, "training_error", {"text": error, "rank": rank}))
        attributes = {"exit_code": code, "rank": rank, "goodbye": goodbye}
        self.events.append(Happening(time_s, node, 0, "process_exit", attributes))
        return self

    def window(self, **changes: Any) -> Window:
        """Return the window, its arrays read-only."""
        for values in self.device.values():
            values.flags.writeable = False
        fields: dict[str, Any] = {
            "now_s": NOW_S,
            "job": "j",
            "attempt": 0,
            "started_s": self.started_s,
            "interval_s": INTERVAL_S,
            "times_s": self.times_s,
            "nodes": self.nodes,
            "series": self.series,
            "role_of": np.zeros(len(self.series), dtype=np.intp),
            "device": self.device,
            "node": {},
            "heard_s": self.heard_s,
            "farewell": self.farewell,
            "silent_s": self.silent_s,
            "watching_since_s": self.watching_since_s,
            "phase": tuple(self.phase),
            "phase_since_s": self.phase_since_s,
            "pauses": tuple(self.pauses),
            "events": tuple(self.events),
        }
        return Window(**{**fields, **changes})
