"""Shows whether a node that holds others up is busy reading, writing or computing on its host."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.medians import median_of, median_over_rows
from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.signs.peers import level
from eagle_eye.detectors.signs.under_load import means
from eagle_eye.detectors.types import Integers, Window

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
CPU = "node_cpu_utilization_ratio"
# Signs that a host has too few processors for its processes, and the level that a node's median must reach: for half of
# the time some process waits for one (pressure stall information), or none is ever idle (kernels without it).
SHORT_SIGNS = (("node_cpu_pressure_ratio", 0.5), (CPU, 0.98))
CPU_READINGS_MIN = 4  # of a host, before and since
CPU_MORE_RATIO = 0.02  # of the host's processors: compilers start a process for each of dozens


def busy_with_io(window: Window, node: int, before_s: float) -> bool | None:
    """Return whether the node (its index) reads or writes much more now than it did before ``before_s``.

    None if none of its metrics was observed before and since: unknown. If the window has no row from before that moment
    any more, a node that reads or writes much is busy: an assumed write does not become a hang by lasting.
    """
    busy, known = _busy(window, np.array([node]), before_s)
    return True if busy[0] else False if known[0] else None


def processors_short(window: Window, since_s: float) -> bool:
    """Whether most hosts have had too few processors for their processes since a time.

    Then ranks' times differ from step to step by who ran when, which says nothing of their work or their nodes.
    """
    rows = window.node_times_s > since_s
    for metric, least in SHORT_SIGNS:
        values = window.node.get(metric)
        if values is None:
            continue
        levels = median_over_rows(values[rows])
        known = levels[np.isfinite(levels)]
        if len(known):
            return 2 * int((known >= least).sum()) > len(known)
    return False


def no_busier(window: Window, node: int, before_s: float) -> bool:
    """Whether the node (its index) is seen to do no more since ``before_s`` than the others, which all wait.

    It reads and writes no more than before, and its processors are as busy as they would be had their load changed as
    that of the others' did. False if either was not observed.
    """
    values = window.node.get(CPU)
    if values is None or busy_with_io(window, node, before_s) is not False:
        return False
    before = int(np.searchsorted(window.node_times_s, before_s, side="left"))
    sides = values[:before][-ROWS_BEFORE:], values[window.node_times_s > before_s + window.interval_s]
    if any(np.isfinite(side[:, node]).sum() < CPU_READINGS_MIN for side in sides):
        return False
    then, now = (means(side) for side in sides)
    with np.errstate(invalid="ignore", divide="ignore"):
        others = np.delete(now / then, node)
    others = others[np.isfinite(others)]
    return bool(len(others) > 0 and now[node] - then[node] * median_of(others) <= CPU_MORE_RATIO)


def _busy(window: Window, nodes: Integers, before_s: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which of the nodes are busy, and of which that is known: (nodes,) each."""
    busy, known = np.zeros(len(nodes), dtype=np.bool_), np.zeros(len(nodes), dtype=np.bool_)
    before = int(np.searchsorted(window.node_times_s, before_s, side="left"))
    for metric, least in IO_SIGNS:
        values = window.node.get(metric)
        if values is None:
            continue
        now = level(values[before:][-ROWS_NOW:, nodes], ROWS_NOW).astype(np.float64)
        with np.errstate(invalid="ignore"):
            if before == 0:
                busy |= now > least
                continue
            then = level(values[:before][-ROWS_BEFORE:, nodes], ROWS_BEFORE).astype(np.float64)
            both = np.isfinite(then) & np.isfinite(now)
            busy |= both & (now - then > least) & (now > GROWTH_RATIO * then)
            known |= both
    return busy, known


@once
def most_busy_with_io(window: Window, before_s: float) -> bool:
    """Whether half of the nodes read or write far more than before ``before_s``: an unannounced checkpoint."""
    sample = np.arange(0, len(window.nodes), len(window.nodes) // NODES_SAMPLED + 1)
    busy, _ = _busy(window, sample, before_s)
    return 2 * int(busy.sum()) >= len(busy)
