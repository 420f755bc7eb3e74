"""Agents that send a frame ten times a second over a connection that they keep, and time the acknowledgements."""

from __future__ import annotations

import http.client
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from eagle_eye.schema.frame import CONTENT_TYPE, WIRE_VERSION, Frame, block, encode_frame, encode_request
from eagle_eye.schema.metrics import Scope

NODES = ("n1", "n2", "n3")
INTERVAL_S = 0.1
PATIENCE_S = 30.0
UNAUTHENTICATED_MAX = 8  # connections that may be left of whoever asked for /healthz and /metrics


@dataclass
class Waits:
    """How long each acknowledgement took, by when its frame was sent; ``lost`` frames were refused or not answered."""

    found: list[tuple[float, float]] = field(default_factory=list)
    lost: int = 0

    def between(self, begin_s: float, end_s: float) -> dict[str, float]:
        """Return the quantiles of frames that were sent in this time."""
        took = sorted(wait_s for sent_s, wait_s in self.found if begin_s <= sent_s < end_s) or [float("nan")]
        return {name: took[min(int(share * len(took)), len(took) - 1)] for name, share in _QUANTILES}

    @staticmethod
    def log_bytes(log: Path) -> int:
        """Return how much a program wrote to its log."""
        return log.stat().st_size


_QUANTILES = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))


class Agents:
    """One thread for each node, from now until ``stop``."""

    def __init__(self, port: int, tokens: list[str]) -> None:
        self._port = port
        self._waits = Waits()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(node, token), daemon=True)
            for node, token in zip(NODES, tokens, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> Waits:
        """Return what came of it."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        return self._waits

    def _run(self, node: str, token: str) -> None:
        headers = {"content-type": CONTENT_TYPE, "authorization": f"Bearer {token}"}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        sequence = 0
        while not self._stopping.wait(INTERVAL_S):
            sequence += 1
            sent_s = time.time()
            try:
                connection.request("POST", "/api/v1/frames", _body(node, sequence, sent_s), headers)
                answer = connection.getresponse()
                answer.read()
                self._waits.lost += answer.status != 200
            except (OSError, http.client.HTTPException):
                connection.close()
                self._waits.lost += 1
            self._waits.found.append((sent_s, time.time() - sent_s))
        connection.close()


def _body(node: str, sequence: int, now_s: float) -> bytes:
    frame = Frame(
        version=WIRE_VERSION,
        node=node,
        boot_id="boot",
        stream="stream",
        sequence=sequence,
        time_s=now_s,
        interval_s=INTERVAL_S,
        agent_version="benchmark",
        blocks=[block(Scope.DEVICE, {gpu: {"gpu_power_watts": 400.0 + gpu} for gpu in range(8)})],
    )
    return encode_request([encode_frame(frame)], now_s)
