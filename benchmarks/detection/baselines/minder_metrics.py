"""Minder's seven metrics in our names, and the order in which it asks them.

Minder (Deng et al., NSDI'25, arXiv 2411.01791) finds these most sensitive, in this order; the order in force is learnt
by a decision tree over each window's largest z-score of every metric, whose importances rank them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from sklearn.tree import DecisionTreeClassifier

from benchmarks.detection.matrix import Floats, TraceMatrix

# Minder's name -> our metrics, added up.
MAPPING: dict[str, tuple[str, ...]] = {
    "pfc_tx_packet_rate": ("node_pfc_tx_pause_packets_per_second",),
    "cpu_usage": ("node_cpu_utilization_ratio",),
    "gpu_duty_cycle": ("gpu_utilization_ratio",),
    "gpu_power_draw": ("gpu_power_watts",),
    "graphics_engine_activity": ("gpu_sm_active_ratio",),  # DCGM's GR_ENGINE_ACTIVE; the nearest of our metrics
    "tensor_activity": ("gpu_tensor_active_ratio",),
    "nvlink_bandwidth": ("gpu_nvlink_tx_bytes_per_second", "gpu_nvlink_rx_bytes_per_second"),
}
PUBLISHED_ORDER = tuple(MAPPING)
TREE_DEPTH = 7
TREE_SEED = 0
FAULTY_SHARE_MIN = 0.5  # of a window that must lie in a labelled fault for the window to count as abnormal


def metric_values(trace: TraceMatrix, name: str) -> Floats | None:
    """Return (T, N) of one of the seven, gaps held; None where the trace has none of what it is made of."""
    parts = [v for v in (trace.held(metric) for metric in MAPPING[name]) if v is not None]
    return np.asarray(sum(parts[1:], start=parts[0])) if parts else None


def learn_order(traces: Sequence[TraceMatrix], window: int) -> tuple[str, ...]:
    """Return the seven by their importance to the tree; those that it does not use keep their published order."""
    features, abnormal = [], []
    for trace in traces:
        table = np.stack([_largest_z(metric_values(trace, name), len(trace.times_s)) for name in PUBLISHED_ORDER], 1)
        ends = trace.times_s[window - 1 :]
        if len(ends) == 0:
            continue
        # Windows stand one behind the other without overlap here: overlapping ones only repeat each other.
        chosen = slice(None, None, window)
        features.append(sliding_window_view(table, window, axis=0).max(axis=-1)[chosen])
        abnormal.append(_faulty(trace, ends, window)[chosen])
    labels = np.concatenate(abnormal) if abnormal else np.zeros(0, dtype=np.bool_)
    if not labels.any() or labels.all():
        return PUBLISHED_ORDER
    tree = DecisionTreeClassifier(max_depth=TREE_DEPTH, class_weight="balanced", random_state=TREE_SEED)
    tree.fit(np.concatenate(features), labels)
    importance = dict(zip(PUBLISHED_ORDER, tree.feature_importances_, strict=True))
    return tuple(sorted(PUBLISHED_ORDER, key=lambda name: -importance[name]))


def _largest_z(values: Floats | None, lines: int) -> Floats:
    """Return (T,) the largest z-score over the nodes, 0 where the metric is absent or all nodes are equal."""
    if values is None or np.isnan(values).all():
        return np.zeros(lines)
    known = np.where(np.isnan(values), np.nanmean(values), values)
    sigma = known.std(axis=1)
    spread = np.abs(known - known.mean(axis=1, keepdims=True)).max(axis=1)
    return np.asarray(np.divide(spread, sigma, out=np.zeros(lines), where=sigma > 0))


def _faulty(trace: TraceMatrix, ends_s: Floats, window: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    length_s = window * trace.interval_s
    result = np.zeros(len(ends_s), dtype=np.bool_)
    for label in trace.labels:
        if label.nodes:
            overlap_s = np.minimum(ends_s, label.end) - np.maximum(ends_s - length_s, label.start)
            result |= overlap_s >= FAULTY_SHARE_MIN * length_s
    return result
