"""Shows whether a node that holds others up is busy reading or writing."""

from __future__ import annotations

import numpy as np

from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.signs.peers import level
from eagle_eye.detectors.types import Window

# Metric and the increase that counts as busy.
IO_SIGNS = (
    ("node_disk_write_bytes_per_second", 1e8),
    ("node_disk_read_bytes_per_second", 1e8),
    ("node_network_tx_bytes_per_second", 1e8),
    ("node_iowait_ratio", 0.05),
    ("node_io_pressure_ratio", 0.10),
    ("node_blocked_tasks", 4.0),
)
GROWTH_RATIO = 2.0  # and at least this many times the earlier level
ROWS_BEFORE = 30
ROWS_NOW = 5
NODES_SAMPLED = 32


def busy_with_io(window: Window, node: int, before_s: float) -> bool | None:
    """Return whether the node (its index) reads or writes much more now than it did before ``before_s``.

    None if none of its metrics was observed before and since: unknown. If the window has no row from before that moment
    any more, a node that reads or writes much is busy: an assumed write does not become a hang by lasting.
    """
    known = False
    before = int(np.searchsorted(window.node_times_s, before_s, side="left"))
    for metric, least in IO_SIGNS:
        values = window.node.get(metric)
        if values is None:
            continue
        own = values[:, node : node + 1]
        now = float(level(own[before:], ROWS_NOW)[0])
        if before == 0:
            if now > least:
                return True
            continue
        then = float(level(own[:before], ROWS_BEFORE)[0])
        if np.isfinite(then) and np.isfinite(now):
            known = True
            if now - then > least and now > GROWTH_RATIO * then:
                return True
    return False if known else None


@once
def most_busy_with_io(window: Window, before_s: float) -> bool:
    """Whether half of the nodes read or write far more than before ``before_s``: an unannounced checkpoint."""
    sample = range(0, len(window.nodes), len(window.nodes) // NODES_SAMPLED + 1)
    busy = [busy_with_io(window, node, before_s) for node in sample]
    return 2 * sum(bool(one) for one in busy) >= len(busy)
