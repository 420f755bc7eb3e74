"""Tests whether a GPU works while its peers wait, from NVML counters, independent of the program's reports.

A rank that needs longer for the same work is busy for a larger part of the step than the peers that wait for it in a
collective. The counters of a waiting GPU differ by site and library (some spin at full utilisation and occupy their
SMs), so each counter is tested for the change of this GPU's level relative to its peers' at the moment it became slow.
All counters together are one kind of evidence. A GPU that receives its kernels late idles more than its peers instead:
then its host is slow, not the GPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from eagle_eye.detectors.signs.medians import median_of
from eagle_eye.detectors.signs.peers import PEERS_MIN, SIGMA_PER_MAD
from eagle_eye.detectors.signs.progress import typical_step_s
from eagle_eye.detectors.signs.under_load import means, peers_of
from eagle_eye.detectors.types import Floats, Integers, Window

COUNTERS = (
    "gpu_sm_active_ratio",
    "gpu_power_watts",
    "gpu_tensor_active_ratio",
    "gpu_dram_active_ratio",
    "gpu_utilization_ratio",
    "gpu_nvlink_tx_bytes_per_second",
    "gpu_nvlink_bytes_per_second",
)
OCCUPANCY = frozenset({"gpu_sm_active_ratio", "gpu_utilization_ratio"})  # fall only while no kernel runs
ROWS_MIN = 4  # observed on each side
BEFORE_S = 300.0
DISTANCE = 4.0  # robust deviations of the peers' own changes
CHANGE_SHARE = 0.25  # of the change of a counter that waiting leaves at zero
SPREAD_FLOOR = 0.005
FEW_PEERS = 4.0  # a spread of n peers counts 1 + 4/n times
PEERS_SHARE = 0.5  # of the peers, that must report a counter


class Busier(NamedTuple):
    """The counter with the clearest evidence: a GPU's level over its own before, and its peers' over theirs."""

    metric: str
    own: float
    peers: float


def busy_among_waiting(window: Window, index: int, onset_s: float, slowdown: float) -> Busier | None:
    """Return evidence that the GPU works while its peers wait; None if there is none or it idles more than they do.

    ``slowdown`` is by what share the job's steps are longer since ``onset_s``: peers wait that much more.
    """
    peers = peers_of(window, index, window.role_of)
    settle_s = typical_step_s(window) + window.interval_s
    before = (window.times_s <= onset_s - window.interval_s) & (window.times_s > onset_s - BEFORE_S)
    since = window.times_s > onset_s + settle_s
    least = CHANGE_SHARE * math.log1p(max(slowdown, 0.0))
    found: list[tuple[float, Busier]] = []
    for metric in COUNTERS:
        values = window.device.get(metric)
        if values is None or least <= 0:
            continue
        own, others = _changes(values[before], values[since], index, peers)
        if not math.isfinite(own) or len(others) < max(PEERS_MIN, PEERS_SHARE * len(peers)):
            continue
        centre = median_of(others)
        sigma = max(SIGMA_PER_MAD * median_of(np.abs(others - centre)), SPREAD_FLOOR) * (1 + FEW_PEERS / len(others))
        line = max(DISTANCE * sigma, least)
        if metric in OCCUPANCY and own - centre <= -line:
            return None
        if own - centre >= line:
            found.append(((own - centre) / sigma, Busier(metric, math.exp(own), math.exp(centre))))
    return max(found)[1] if found else None


def _changes(before: Floats, since: Floats, index: int, peers: Integers) -> tuple[float, Floats]:
    """Return the logarithm of the change of a series' mean, and those of its reporting peers, (peers,)."""
    columns = np.concatenate([[index], peers])
    changes = np.full(len(columns), np.nan)
    parts = [part[:, columns] for part in (before, since)]
    enough = np.all([np.isfinite(part).sum(axis=0) >= ROWS_MIN for part in parts], axis=0)
    if enough.any():
        earlier, later = (means(part[:, enough]) for part in parts)
        with np.errstate(invalid="ignore", divide="ignore"):
            changes[enough] = np.log(later / earlier)
    known = changes[1:]
    return float(changes[0]), known[np.isfinite(known)]
