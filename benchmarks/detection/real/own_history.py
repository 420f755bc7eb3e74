"""Detectors that know one machine's own past: the protocol, and two baselines of it.

A new detector is one class with ``name``, ``fit`` and ``score``, added to ``DETECTORS`` in smd.py. It never sees
the test part before it is scored there, and its threshold comes from the train part alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors

Floats = NDArray[np.floating[Any]]

CLIP_SIGMAS = 10.0
SPREAD_FLOOR = 1e-3  # metrics lie in [0, 1]
CALIBRATION_SHARE = 0.3  # the newest part of train, which a model is not fitted on when its threshold is chosen


class OwnHistory(Protocol):
    """Scores how unlike a machine's own past each moment is. Causal: a score depends on nothing after its moment."""

    @property
    def name(self) -> str:
        """The name in tables."""
        ...

    def fit(self, train: Floats) -> None:
        """Learn from (T, M) values of healthy, or mostly healthy, operation; the same data give the same model."""
        ...

    def score(self, test: Floats) -> Floats:
        """Return (T,) scores, the higher the stranger."""
        ...


@dataclass(slots=True)
class NearestNeighbour:
    """Distance to the nearest moment of train, of z-scores clipped at 10 sigma."""

    name: str = "1-NN, clipped z-scores"
    _mean: Floats = field(default_factory=lambda: np.zeros(0))
    _spread: Floats = field(default_factory=lambda: np.ones(0))
    _index: NearestNeighbors | None = None

    def fit(self, train: Floats) -> None:
        """Keep every moment of train."""
        self._mean, self._spread = train.mean(axis=0), np.maximum(train.std(axis=0), SPREAD_FLOOR)
        self._index = NearestNeighbors(n_neighbors=1, algorithm="brute").fit(self._clipped(train))

    def score(self, test: Floats) -> Floats:
        """Return (T,) Euclidean distances in sigmas."""
        if self._index is None:
            raise RuntimeError("score() before fit()")
        distances, _ = self._index.kneighbors(self._clipped(test))
        return np.asarray(distances[:, 0])

    def _clipped(self, values: Floats) -> Floats:
        z = (values - self._mean) / self._spread
        return np.clip(z, -CLIP_SIGMAS, CLIP_SIGMAS).astype(np.float32)


@dataclass(slots=True)
class PcaEwma:
    """What the principal components of train do not explain (Jackson & Mudholkar 1979), smoothed exponentially."""

    name: str = "PCA + EWMA"
    explained: float = 0.9  # of train's variance
    weight: float = 0.2  # of the newest moment
    _mean: Floats = field(default_factory=lambda: np.zeros(0))
    _spread: Floats = field(default_factory=lambda: np.ones(0))
    _pca: PCA | None = None

    def fit(self, train: Floats) -> None:
        """Find the components that explain nine tenths of train's variance."""
        self._mean, self._spread = train.mean(axis=0), np.maximum(train.std(axis=0), SPREAD_FLOOR)
        self._pca = PCA(n_components=self.explained, svd_solver="full").fit(self._clipped(train))

    def score(self, test: Floats) -> Floats:
        """Return (T,) smoothed squared residuals."""
        if self._pca is None:
            raise RuntimeError("score() before fit()")
        z = self._clipped(test)
        residual = np.sum((z - self._pca.inverse_transform(self._pca.transform(z))) ** 2, axis=1)
        smooth = np.empty(len(residual))
        level = float(residual[0]) if len(residual) else 0.0
        for index, value in enumerate(residual):
            level += self.weight * (float(value) - level)
            smooth[index] = level
        return smooth

    def _clipped(self, values: Floats) -> Floats:
        return np.asarray(np.clip((values - self._mean) / self._spread, -CLIP_SIGMAS, CLIP_SIGMAS))


def own_thresholds(
    detector: OwnHistory, train: Floats, alarms_per_day: Sequence[float], lines_per_day: float
) -> list[float]:
    """Return for each budget the lowest threshold that keeps the newest 30% of train, unseen, to so many alarms a day.

    One rule for every detector. After it the detector is fitted on the whole of train.
    """
    cut = round(len(train) * (1 - CALIBRATION_SHARE))
    detector.fit(train[:cut])
    scores = detector.score(train[cut:])
    # From the top down: at the highest score there is no alarm; further down, alarms that merge hide their number.
    candidates = np.unique(scores)[::-1]
    candidates = candidates[:: max(len(candidates) // CANDIDATES, 1)]
    thresholds = []
    for budget in alarms_per_day:
        allowed = int(budget * len(scores) / lines_per_day)
        best = float(candidates[0])
        for candidate in candidates:
            if len(alarm_runs(scores > candidate)) > allowed:
                break
            best = float(candidate)
        thresholds.append(best)
    detector.fit(train)
    return thresholds


CANDIDATES = 2_000  # thresholds tried
ALARM_GAP_LINES = 10  # alarms closer than this are one: a person who was called is already there


def alarm_runs(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return (first, one past the last) of each alarm in a (T,) array."""
    lines = np.flatnonzero(flags)
    if len(lines) == 0:
        return []
    breaks = np.flatnonzero(np.diff(lines) > ALARM_GAP_LINES)
    firsts, lasts = np.concatenate([[0], breaks + 1]), np.concatenate([breaks, [len(lines) - 1]])
    return [(int(lines[a]), int(lines[b]) + 1) for a, b in zip(firsts, lasts, strict=True)]


@dataclass(frozen=True, slots=True)
class EventScore:
    """Events found, alarms that met an event, and those that met none."""

    events: int
    found: int
    alarms: int
    false: int

    def __add__(self, other: EventScore) -> EventScore:
        """Return both together."""
        return EventScore(
            self.events + other.events, self.found + other.found, self.alarms + other.alarms, self.false + other.false
        )

    @property
    def f1(self) -> float:
        """Harmonic mean of the share of events found and the share of alarms that met one."""
        recall = self.found / self.events if self.events else 0.0
        precision = (self.alarms - self.false) / self.alarms if self.alarms else 0.0
        return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def event_score(flags: NDArray[np.bool_], labels: NDArray[np.bool_]) -> EventScore:
    """Return how alarms and labelled events meet; an event counts once however long it is: no point adjustment."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], labels.astype(np.int8), [0]])))
    events = list(zip(edges[::2], edges[1::2], strict=True))
    alarms = alarm_runs(flags)
    found = sum(bool(flags[a:b].any()) for a, b in events)
    met = sum(bool(labels[a:b].any()) for a, b in alarms)
    return EventScore(len(events), found, len(alarms), len(alarms) - met)
