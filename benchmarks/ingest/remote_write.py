"""Prometheus remote write 1.0 for the peers: the fleet's samples as snappy-framed protobuf, built in bulk.

The series' labels are encoded once; of each interval only values and times are written into the bodies. The bodies are
framed as snappy literals, uncompressed: legal, and less work for whoever reads them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_eye.simulator.load.fleet import GAUGES, METRICS, PLAIN, TRAINED, Readings

SERIES_PER_REQUEST = 10_000  # what vmagent sends at most; Prometheus sends 500 to 2,000: more work for the receiver
PREFIX = "eagle_eye_"
HEADERS = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
    "User-Agent": "eagle-eye-benchmark/1",
}
_STEPS = {gauge.name: gauge.step for gauge in GAUGES} | dict.fromkeys(TRAINED, 1e-6)


def varint(number: int) -> bytes:
    """Return a protobuf variable-length integer."""
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def field(number: int, content: bytes) -> bytes:
    """Return a length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(content)) + content


class Bodies:
    """The requests of a fleet's intervals. Series are (node, metric, gpu), with four labels each.

    ``per_node``: a request a node and interval, as agents send them; else as large as they may be.
    """

    def __init__(self, nodes: list[str], gpus: int, *, per_node: bool = False) -> None:
        series = [(f"{PREFIX}{metric}", node, str(gpu)) for node in nodes for metric in METRICS for gpu in range(gpus)]
        size = len(METRICS) * gpus if per_node else SERIES_PER_REQUEST
        self._requests = [_Request(series[at : at + size]) for at in range(0, len(series), size)]

    def of(self, readings: Readings, time_s: float) -> Iterator[bytes]:
        """Yield the bodies of one interval."""
        plain = np.stack([_decimal(readings.plain[:, at], _STEPS.get(name, 1.0)) for at, name in enumerate(PLAIN)], 1)
        values = np.concatenate([readings.exact, plain], axis=1, dtype="<f8").reshape(-1)
        first = 0
        for request in self._requests:
            yield request.body(values[first : first + request.series], time_s)
            first += request.series


class _Request:
    def __init__(self, series: list[tuple[str, str, str]]) -> None:
        self.series = len(series)
        parts: list[bytes] = []
        places: list[int] = []
        at = 0
        sample = b"\x09" + bytes(8) + b"\x10" + varint(1_700_000_000_000)
        for name, node, gpu in series:
            labels = (("__name__", name), ("gpu", gpu), ("instance", node), ("job", "loadtest"))
            reported = b"".join(field(1, field(1, key.encode()) + field(2, value.encode())) for key, value in labels)
            part = field(1, reported + field(2, sample))
            parts.append(part)
            at += len(part)
            places.append(at - len(sample) + 1)
        raw = b"".join(parts)
        head = varint(len(raw)) + b"\xfc" + struct.pack("<I", len(raw) - 1)  # one literal of so many bytes
        self._body = np.frombuffer(bytearray(head + raw), dtype=np.uint8)
        begin = np.array(places)[:, None] + len(head)
        self._values_at = begin + np.arange(8)
        self._times_at = begin + 9 + np.arange(6)

    def body(self, values: NDArray[Any], time_s: float) -> bytes:
        """Return the request with these values at a time."""
        self._body[self._values_at] = values.view(np.uint8).reshape(-1, 8)
        self._body[self._times_at] = np.frombuffer(varint(round(1_000 * time_s)), dtype=np.uint8)
        return self._body.tobytes()


def _decimal(values: NDArray[np.float32], step: float) -> NDArray[np.float64]:
    """Return what the source read: 0.98, where float32 has 0.9800000190734863. Peers' codecs live on that."""
    wide = values.astype(np.float64)
    if step >= 1.0:
        return np.rint(wide / step) * step
    parts = round(1.0 / step)
    return np.rint(wide * parts) / parts
