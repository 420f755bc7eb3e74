"""Parses NCCL Inspector's Prometheus files: the latest figures of one GPU. Pure."""

from __future__ import annotations

import math
import re

FILE_BYTES_MAX = 1 << 20  # a communicator has about 3 KB
LINES_MAX = 4_096
BYTES_PER_GIGABYTE = 1e9

_BANDWIDTH = re.compile(r"nccl_bus_bandwidth_gbs\{([^}]{0,2000})\}\s+([0-9.eE+-]{1,32})(?:\s|$)")
_RANKS = re.compile(r'\bn_?ranks="([0-9]{1,9})"')


def bus_bandwidth(text: str) -> float | None:
    """Return the mean bus bandwidth of the widest communicator's collectives, bytes per second; None: absent."""
    by_ranks: dict[int, list[float]] = {}
    for line in text.splitlines()[:LINES_MAX]:
        match = _BANDWIDTH.match(line)
        if match is None:
            continue
        ranks = _RANKS.search(match[1])
        try:
            value = float(match[2])
        except ValueError:
            continue
        if math.isfinite(value) and 0.0 < value < 1e6:
            by_ranks.setdefault(int(ranks[1]) if ranks is not None else 0, []).append(value)
    if not by_ranks:
        return None
    widest = by_ranks[max(by_ranks)]
    return sum(widest) / len(widest) * BYTES_PER_GIGABYTE
